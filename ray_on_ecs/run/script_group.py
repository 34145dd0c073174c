"""The scripts of a worker group, as the driver sees and directs them: restarts in place, as torchrun's agent does.

Each poll reads the workers' statuses from the run's actor, and leaves the directive there. When a script fails, all are
ended and the failure policy decides; the living workers then start the scripts again. Each end has the same steps:
SIGTERM, a grace period, SIGKILL, and the files are stored.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import StorageError, TrainingError, one_line
from ray_on_ecs.run.failure_policy import Failure
from ray_on_ecs.run.group import Directive, WorkerStatuses
from ray_on_ecs.run.last_words import FATAL
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.tracking.run_actor import RunClient

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # a part of each restart's duration
NOTICE_POLL_SECONDS = 1.0
# A node is reclaimed after this time if AWS reports no deadline.
DEFAULT_PREEMPTION_SECONDS = 60.0
# The scripts end this long before the deadline.
MARGIN_SECONDS = 5.0
# How long the workers may take to store the last files, once the scripts have ended.
STORE_SECONDS = 30.0
# How long workers without a script may take to leave.
LEAVE_SECONDS = 2.0
# A rank that left with 0 at least this long before the others failed is named with them.
EARLY_SECONDS = 0.5
SILENT_SECONDS = 600.0
# Files in a hint.
MAX_HINTS = 3


@dataclass(frozen=True)
class ReclaimNotice:
    """Notice that nodes of workers are being reclaimed.

    Attributes:
        ranks: The workers on these nodes.
        end_at: When their scripts have to end (Unix time).
    """

    ranks: tuple[int, ...]
    end_at: float


@dataclass(frozen=True)
class Decider:
    """The driver's part in a failure.

    Attributes:
        began: Called when all scripts have been started.
        decide: Returns if the run continues after a failure, or raises the error that ends it.
        store_stacks: Stores stacks by rank, and returns the folder's name.
    """

    began: Callable[[], None]
    decide: Callable[[Failure], None]
    store_stacks: Callable[[dict[int, str]], str]


class ScriptGroup:
    """The scripts of all workers. `poll` is called again and again while Ray Train runs the workers.

    Attributes:
        error: Why the run was given up, or None.
        is_reclaimed: True if the scripts have ended because nodes are being reclaimed.
    """

    def __init__(
        self,
        actor: RunClient,
        config: RunConfig,
        decider: Decider,
        draining_nodes: Callable[[], dict[str, float | None]],
        left_out: Sequence[str] = (),
    ) -> None:
        self._actor = actor
        self._config = config
        self._decider = decider
        self._draining_nodes = draining_nodes
        self._left_out = left_out
        self._directive = Directive("", 0)
        self._ended_for: Literal["failed", "hung"] | None = None
        self._has_begun = False
        self._checked_nodes_at = 0.0
        self._has_stacks = False
        self.error: TrainingError | None = None
        self.is_reclaimed = False

    def new_fit(self) -> None:
        """Forget the workers that there were: others follow, whose scripts count as started again."""
        if self._directive.group:
            self._next_generation("")

    def poll(self) -> None:
        """Look at the workers once, and direct them."""
        answer = self._actor.direct(self._directive)
        if answer is None:
            return
        group, workers = answer
        if group is None or group in self._directive.past:
            return
        if group != self._directive.group:
            self._follow(group)
            return
        generation = self._directive.generation
        self._step({rank: worker for rank, worker in workers.items() if worker.generation == generation})

    def _follow(self, group: str) -> None:
        """Direct another worker group: the first one, or Ray Train itself has changed the number of workers."""
        logger.debug(f"worker group {group[:8]}")
        if not self._directive.group:
            self._directive = replace(self._directive, group=group)
        elif self.error or self._directive.action == "leave":
            self._directive = replace(self._directive, group=group, action="leave", past=self._past(group))
        else:
            self._next_generation(group)

    def stop(self, error: TrainingError, seconds: float = GRACE_SECONDS) -> None:
        """End the scripts, after which the run is given up for this error."""
        if self.error is None:
            self.error = error
            self._end("end", seconds if self._directive.group else 0.0)
        if not self._directive.group:  # there is no script
            self._direct(action="leave")

    @property
    def has_workers(self) -> bool:
        """True once workers have reported since the last call of Ray Train's `fit`."""
        return bool(self._directive.group)

    @property
    def waits_until(self) -> float:
        """Deadline of the workers to end and to store everything (Unix time)."""
        return self._directive.end_at + (STORE_SECONDS if self._directive.group else LEAVE_SECONDS)

    def _step(self, workers: WorkerStatuses) -> None:
        """Direct the workers of the present group and generation."""
        action = self._directive.action
        is_complete = bool(workers) and len(workers) == next(iter(workers.values())).world_size
        if action == "run":
            self._watch(workers, is_complete)
        elif action != "leave" and is_complete and all(worker.is_stored for worker in workers.values()):
            self._conclude(workers)

    def _watch(self, workers: WorkerStatuses, is_complete: bool) -> None:
        if is_complete and not self._has_begun and all(worker.started_at for worker in workers.values()):
            self._has_begun = True
            self._decider.began()
        if any(worker.status for worker in workers.values()):
            logger.debug(f"exit statuses: {[worker.status for _, worker in sorted(workers.items())]}")
            self._ended_for = "failed"
            self._end("end", GRACE_SECONDS)
        elif notice := self._check_nodes(workers):
            self.is_reclaimed = True
            self._direct(action="end", ranks=notice.ranks, end_at=notice.end_at)
        elif is_complete and self._has_begun:
            if all(worker.is_stored for worker in workers.values()):
                self._check_stored(workers)
                self._direct(action="leave")
            elif any(worker.status is None for worker in workers.values()):
                self._watch_silence(workers)

    def _check_nodes(self, workers: WorkerStatuses) -> ReclaimNotice | None:
        """Look for nodes that are being reclaimed; at most once a second, because that asks Ray's head."""
        if time.monotonic() - self._checked_nodes_at < NOTICE_POLL_SECONDS:
            return None
        self._checked_nodes_at = time.monotonic()
        draining = self._draining_nodes()
        ranks = tuple(rank for rank, worker in workers.items() if worker.node_id in draining)
        if not ranks:
            return None
        deadlines = [draining[workers[rank].node_id] for rank in ranks]
        first = min(filter(None, deadlines), default=time.time() + DEFAULT_PREEMPTION_SECONDS)
        return ReclaimNotice(ranks, first - MARGIN_SECONDS)

    def _watch_silence(self, workers: WorkerStatuses) -> None:
        """End scripts that hang: they have reported steps, or the user has named the time."""
        silent_seconds = min(worker.silent_seconds for worker in workers.values())
        if silent_seconds <= (self._config.hang_timeout or SILENT_SECONDS):
            return
        if self._config.hang_timeout or any(worker.has_steps for worker in workers.values()):
            self._ended_for = "hung"
            self._end("abort", 0.0)
        elif not self._directive.wants_stacks:
            self._direct(wants_stacks=True)
        elif not self._has_stacks and all(
            worker.stacks is not None or worker.status == 0 for worker in workers.values()
        ):
            self._has_stacks = True
            folder = self._decider.store_stacks({rank: worker.stacks or "" for rank, worker in workers.items()})
            logger.info(
                f"the script has been silent for {silent_seconds:.0f} s and has never reported a step, so it runs on; "
                f"its stacks are in {folder} (--hang-timeout ends a script that is silent for longer)"
            )

    def _check_stored(self, workers: WorkerStatuses) -> None:
        """Fail a run whose script has ended well if its last files were not stored; say so of any other run."""
        reason = next((worker.not_stored for worker in workers.values() if worker.not_stored), None)
        if reason is None:
            return
        what = f"the last files could not be stored ({reason})"
        if self.error or self._ended_for or self.is_reclaimed:
            logger.warning(what)
        else:
            self.error = StorageError(f"{what}; continue with --run-name {self._config.run_name}")

    def _conclude(self, workers: WorkerStatuses) -> None:
        """Decide what follows, now that all scripts have ended and all files are stored."""
        self._check_stored(workers)
        if self.error is None and self._ended_for:
            try:
                self._decider.decide(self._describe(workers))
            except TrainingError as error:
                self.error = error
            else:
                self._next_generation(self._directive.group)
                return
        self._direct(action="leave")

    def _describe(self, workers: WorkerStatuses) -> Failure:
        if self._ended_for == "failed":
            failure = describe(workers, self._config.command[0])
            text = failure.words.text
            what = failure.what + missing_file_hint(text, self._left_out) + access_denied_hint(text, self._config)
            return replace(failure, what=what, rank=None if self._config.driver else failure.rank)
        folder = self._decider.store_stacks({rank: worker.stacks or "" for rank, worker in workers.items()})
        what = f"no progress for {self._config.hang_timeout or SILENT_SECONDS:g} s"
        return Failure(what, "hung", stacks=folder, log=workers[min(workers)].log)

    def _next_generation(self, group: str) -> None:
        self._ended_for = None
        self._has_begun = self._has_stacks = self.is_reclaimed = False
        self._directive = Directive(group, self._directive.generation + 1, past=self._past(group))
        logger.debug(f"start {self._directive.generation} of the scripts")

    def _past(self, group: str) -> tuple[str, ...]:
        """Return the groups before another one."""
        directive = self._directive
        if group == directive.group or not directive.group:
            return directive.past
        return (*directive.past, directive.group)

    def _end(self, action: str, seconds: float) -> None:
        self._direct(action=action, end_at=time.time() + seconds)

    def _direct(self, **changes: Any) -> None:
        directive = replace(self._directive, **changes)
        if directive != self._directive:
            logger.debug(f"start {directive.generation} of the scripts: {changes}")
        self._directive = directive
        self._actor.direct(self._directive)


def missing_file_hint(text: str, left_out: Sequence[str]) -> str:
    """Return a hint if a script's last words name files that were left out of the upload, else nothing."""
    if "No such file" not in text and "not found" not in text:
        return ""
    names = [name for name in left_out if re.search(rf"(?<![\w.-]){re.escape(name)}", text)][:MAX_HINTS]
    if not names:
        return ""
    was, it = ("was", "it") if len(names) == 1 else ("were", "them")
    flags = " ".join(f"--include '{name}'" for name in names)
    return f"; {', '.join(names)} {was} left out of the upload, and {flags} brings {it}"


def access_denied_hint(text: str, config: RunConfig) -> str:
    """Return what tasks may do if a script's last words say that AWS refused it, else nothing."""
    if not re.search("ACCESS_DENIED|AccessDenied", text) or not config.storage_path.startswith("s3://"):
        return ""
    default = ", where Ray's results are if the program names no storage_path" if config.driver else ""
    return f"; tasks may write below {config.storage_path}{default}, and read the buckets of dataBuckets"


def describe(workers: WorkerStatuses, program: str) -> Failure:
    """Return the failure of scripts that have ended: the rank that failed first is to blame.

    A rank that had ended before with exit status 0 is named, because the others may have waited for it.
    """
    ranks = sorted(workers, key=lambda rank: (workers[rank].ended_at or 0.0, rank))
    failed_rank = next(rank for rank in ranks if workers[rank].status)
    failed = workers[failed_rank]
    status = failed.status or 0
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    reason = failed.words.text or "it printed nothing"
    if status < 0 and failed.words.text and not reason.startswith(FATAL):  # the line does not explain a signal
        reason = f"its last line was {reason!r}"
    what = one_line(f"{program} {how}: {reason}")
    finished_rank = next((rank for rank in ranks if workers[rank].status == 0 and workers[rank].ended_at), None)
    if finished_rank is not None and failed.ended_at:
        seconds = failed.ended_at - (workers[finished_rank].ended_at or 0.0)
        if seconds >= EARLY_SECONDS:
            what += f"; rank {finished_rank} had ended with exit status 0, {seconds:.0f} s before"
    where = "\n".join(failed.log)
    return Failure(what, rank=failed_rank, status=failed.status, words=failed.words, where=where, log=failed.log)
