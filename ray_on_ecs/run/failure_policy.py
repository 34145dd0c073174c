"""Restart policy: when a run continues after a failure, and when it ends.

A failure counts against `--max-restarts` unless there was progress since the one before, and against a limit a day in
any case. Progress is a greater step than any so far, or a new stored file that is not a log: one that a run wrote when
it had lasted a while, because each attempt writes some at its start. Output alone is not: a retry loop prints, too. A
new file is not progress either if the script itself failed at about the same age twice and had got no further: then it
does the same again and again, as one that leaks memory and never loads its checkpoint.
"""

from __future__ import annotations

import builtins
import logging
import re
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ray_on_ecs.errors import TrainingError, UsageError, one_line
from ray_on_ecs.run.last_words import OF_DATALOADER, LastWords

logger = logging.getLogger(__name__)

# A file that an attempt stores within this time does not count as progress.
SETTLING_SECONDS = 60.0
# Ages of two starts are about the same up to this part of them.
SAME_AGE = 0.2
# Signals by which a person or a machine's end stops a script.
OF_OTHERS = (-signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM)
# Folders that a program creates at each start: `2026-11-27/12-00-01`, `20261127-120001-resnet50`, `version_3`,
# TensorBoard's `Nov27_12-00-01_host`, seconds since 1970, and MLflow's IDs.
DATE = (
    r"\d{4}[-_.]\d\d[-_.]\d\d|(?<!\d)\d\d[-_.]\d\d[-_.]20\d\d|(?<!\d)20\d\d(?:0[1-9]|1[0-2])[0-3]\d(?:\d{4}(?:\d\d)?)?(?!\d)"
    r"|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d|(?<!\d)1\d{9}(?!\d)|(?<![\da-f])[\da-f]{32}(?![\da-f])"
)
OF_START = re.compile(rf"(?:^|/)(?:[^/]*(?:{DATE})[^/]*|(?:version|run|exp|experiment|train)_?\d+)/")
FAILURES_A_DAY = 20
DAY_SECONDS = 86400.0
# Exit statuses of a wrong flag, and of a command that can't be run or isn't there, as argparse and shells have them.
USAGE_STATUS, COMMAND_STATUSES = 2, (126, 127)
# Exceptions that a restart does not mend before a run has made progress.
MISTAKES = (AttributeError, FileNotFoundError, ImportError, KeyError, NameError, SyntaxError, TypeError, ValueError)
# Errors of a network, a storage or a device, which may not happen again; OSError without its other subclasses.
PASSING = (BlockingIOError, ConnectionError, EOFError, InterruptedError, TimeoutError)
PASSING_NAMES = (
    *("OSError", "aiohttp.", "botocore.", "google.api_core.", "http.client.", "httpx.", "pyarrow.", "ray.exceptions."),
    *("ray.train.", "requests.", "socket.", "ssl.", "torch.AcceleratorError", "torch.distributed.", "urllib.error."),
    *("urllib3.", "grpc.", "boto3.exceptions.S3UploadFailedError", "fsspec.exceptions.FSTimeoutError"),
    *("huggingface_hub.errors.HfHubHTTPError", "huggingface_hub.utils._errors.HfHubHTTPError"),
    *("mlflow.exceptions.MlflowException", "wandb.errors.CommError", "wandb.errors.errors.CommError"),
)
PASSING_TEXTS = (
    *("CUDA error", "NCCL", "Gloo", "gloo", "Connection closed by peer", "Connection reset by peer", "cuDNN"),
    OF_DATALOADER,
)
OUT_OF_MEMORY = ("CUDA out of memory", "HIP out of memory")
MEMORY_HELP = "a smaller batch, activation checkpointing, a lower precision or a larger GPU needs less"

Kind = Literal["failed", "hung", "reclaimed"]


@dataclass(frozen=True)
class Failure:
    """Why the workers ended.

    Attributes:
        what: The cause on one line.
        kind: The workers failed or were lost; hung; or are on nodes that are being reclaimed.
        rank: The rank that left first, or None.
        status: The exit status of its script, negative for a signal; None if it has none.
        words: The last words of that script, such as its exception.
        cause: The exception of a worker, or None; no restart can mend a `TrainingError`.
        where: The full text of the error, with the traceback.
        stacks: The folder with the stacks of a hang, or None.
        log: The end of that rank's log.
    """

    what: str
    kind: Kind = "failed"
    rank: int | None = None
    status: int | None = None
    words: LastWords = field(default_factory=LastWords)
    cause: BaseException | None = None
    where: str = ""
    stacks: str | None = None
    log: tuple[str, ...] = ()

    def __str__(self) -> str:
        on_rank = "" if self.rank is None or self.kind == "hung" else f" on rank {self.rank}"
        return f"training failed{on_rank}: {self.what}"

    @property
    def signature(self) -> tuple[object, ...] | None:
        """Key of the fault, equal if it ends the run again; None if the fault may pass or differ."""
        error, text = self.words.exception, self.words.text
        if any(pattern in text for pattern in OUT_OF_MEMORY):
            return (OUT_OF_MEMORY,)
        if self.status == USAGE_STATUS and not error:
            return (USAGE_STATUS, text)
        if error is None or self.status is None or self.status <= 0:
            return None
        passes = not self.words.is_mistake and (
            _is_builtin(error, PASSING)
            or error.startswith(PASSING_NAMES)
            or any(pattern in text for pattern in PASSING_TEXTS)
        )
        return None if passes else (error, self.words.place)


@dataclass(frozen=True)
class Restart:
    """Start again. `count` names the failures so far, or is empty if this one does not count."""

    count: str = ""


@dataclass(frozen=True)
class Raise:
    """End the run with an error of this type and line; `is_recorded` if error.json should say so."""

    error: type[TrainingError]
    line: str
    is_recorded: bool = True


@dataclass(frozen=True)
class Mark:
    """Progress of a run.

    Attributes:
        step: The greatest step so far, or None.
        stored_at: When its newest stored file that is not a log was written (Unix time), or None.
        stored: The name of that file.
        is_beyond: True if rank 0's steps or epochs are beyond those of all starts before; None if that is not known.
    """

    step: int | None = None
    stored_at: float | None = None
    stored: str = ""
    is_beyond: bool | None = None


class FailurePolicy:
    """Decides after each failure.

    Args:
        max_restarts: How many failures without progress in between are survived.
        mark: Returns how far the run is; may raise OSError, which counts as no progress.
        clock: The time (Unix).

    Attributes:
        has_begun: True once the workers of an attempt have begun to work.
    """

    def __init__(
        self,
        max_restarts: int,
        mark: Callable[[], Mark],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_restarts = max_restarts
        self._mark = mark
        self._clock = clock
        self._best = self._read() or Mark()
        self._has_worked = self._best != Mark()  # of the whole run: an earlier command's part counts
        self._began_at = clock()
        self.has_begun = False
        self._age: float | None = None  # of the start before, when it failed
        self._without_progress = 0
        self._reclaimed_without_progress = 0
        self._failed_at: deque[float] = deque()
        self._signatures: set[tuple[object, ...]] = set()

    def began(self) -> None:
        """Note that the workers of an attempt have begun to work."""
        self._began_at, self.has_begun = self._clock(), True

    def decide(self, failure: Failure) -> Restart | Raise:
        """Count a failure and return what follows from it."""
        if isinstance(failure.cause, TrainingError):
            if isinstance(failure.cause, UsageError):
                return Raise(type(failure.cause), str(failure.cause), is_recorded=False)
            return Raise(type(failure.cause), failure.what)
        has_progressed = self._has_progressed(failure)
        if has_progressed:
            self._without_progress = self._reclaimed_without_progress = 0
        if failure.kind == "reclaimed":
            return self._decide_reclaimed(has_progressed)
        return self._decide_failed(failure)

    def _decide_reclaimed(self, has_progressed: bool) -> Restart | Raise:
        """Decide about a preemption: it is not a failure, but a run that never gets further must end."""
        self._reclaimed_without_progress += not has_progressed
        if self._reclaimed_without_progress <= max(self.max_restarts, 1):
            return Restart()
        times = self._reclaimed_without_progress
        return Raise(TrainingError, f"training failed: nodes were reclaimed {times} times without progress in between")

    def _decide_failed(self, failure: Failure) -> Restart | Raise:
        self._without_progress += 1
        if not self._has_worked and self._is_mistake(failure):
            advice = failure.words.advice
            return Raise(UsageError, f"{str(failure).rstrip('.')}; {advice}" if advice else str(failure))
        signature = failure.signature
        if signature and signature in self._signatures:
            if signature == (OUT_OF_MEMORY,):
                return Raise(TrainingError, f"{failure} (twice); {MEMORY_HELP}")
            return Raise(TrainingError, f"{failure} (the same error twice)")
        if signature:
            self._signatures.add(signature)
        now = self._clock()
        self._failed_at.append(now)
        while now - self._failed_at[0] > DAY_SECONDS:
            self._failed_at.popleft()
        if self._without_progress > self.max_restarts:
            times = self._without_progress
            count = f" ({times} failures without progress in between)" if times > 1 else ""
            return Raise(TrainingError, f"{failure}{count}")
        if len(self._failed_at) > FAILURES_A_DAY:
            return Raise(TrainingError, f"{failure} ({len(self._failed_at)} failures within 24 hours)")
        return Restart(f"failure {self._without_progress} in a row, --max-restarts is {self.max_restarts}")

    def _is_mistake(self, failure: Failure) -> bool:
        if failure.words.is_mistake or failure.status == USAGE_STATUS or failure.status in COMMAND_STATUSES:
            return True
        name = (failure.words.exception or "").rpartition(".")[2]
        return failure.status is not None and failure.status > 0 and _is_builtin(name, MISTAKES)

    def _has_progressed(self, failure: Failure) -> bool:
        """Return whether there was progress since the last failure, and remember how far the run is."""
        mark, is_repeated = self._read(), self._is_repeated(failure)
        if mark is None:
            return False
        step, best = mark.step, self._best.step
        is_further = step is not None and (best is None or step > best)
        stored_at = mark.stored_at or 0.0
        is_new = stored_at > (self._best.stored_at or 0.0)
        has_stored = self.has_begun and is_new and stored_at >= self._began_at + SETTLING_SECONDS
        is_beyond = not OF_START.search(mark.stored) if mark.is_beyond is None else mark.is_beyond
        has_stored = has_stored and (is_beyond or not is_repeated)
        self._best = Mark(step if is_further else best, mark.stored_at if is_new else self._best.stored_at)
        self._has_worked = self._has_worked or is_further or has_stored
        return is_further or has_stored

    def _is_repeated(self, failure: Failure) -> bool:
        """Return whether the script has failed by itself at about the age at which the start before did."""
        before, self._age = self._age, None
        if failure.status in (None, *OF_OTHERS) or failure.kind != "failed":
            return False
        self._age = self._clock() - self._began_at
        return before is not None and abs(self._age - before) <= SAME_AGE * before

    def _read(self) -> Mark | None:
        try:
            return self._mark()
        except OSError as cause:
            logger.debug(f"the progress is not known, and counts as none ({one_line(cause)})")
            return None


def _is_builtin(name: str, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether an exception of this name is one of these kinds that Python has."""
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, kinds)
