"""Record of a command in the run's folder: its status, its log, and a report at its end.

They are for people: the run does not depend on them, and a failed write neither ends it nor holds it up.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict

import psutil

from ray_on_ecs.config import JOB_VARIABLE, OWNER, RunConfig, user_name
from ray_on_ecs.errors import Interrupted, LimitReached, TrainingError, UsageError, one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.rules import finite
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage, parse_json
from ray_on_ecs.tracking.cost import Earlier, InstanceCost, InstanceKind, cost_of, earlier_of, total_usd
from ray_on_ecs.tracking.end import End, EndLog, Steps, end_in, end_of
from ray_on_ecs.tracking.places import pools_in
from ray_on_ecs.tracking.report import write_report
from ray_on_ecs.tracking.run_log import RunLog
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.slow_ranks import SlowTime, Wait
from ray_on_ecs.tracking.starts import Start, Starts, starts_in

logger = logging.getLogger(__name__)

WRITE_SECONDS, LOG_SECONDS = 10.0, 60.0  # each write of a log stores all of it

State = Literal["queued", "waiting", "training", "finished", "failed", "interrupted", "limit"]


class Restarted(TypedDict):
    """One restart of a run's scripts."""

    time: str  # UTC (ISO 8601)
    cause: str  # on one line
    kept: str | None  # the newest kept file or checkpoint; null without one, or if it is not known


class Spent(TypedDict):
    """Time and money of all commands of a run, as its limits count them (run/limit.py)."""

    seconds: float  # of running time
    usd: float  # of instances with workers; of those whose price is not known, at an upper bound
    hourly_usd: float  # of the last instances


class Pool(TypedDict):
    """Node group where a run trains."""

    name: str
    zone: str  # several with commas, if the nodes of one run may be in each
    instance_types: list[str]
    gpu: str  # empty without GPUs
    reason: str  # for the choice


class Status(TypedDict):
    """Document `status.json`. Times are in UTC (ISO 8601), and unknown values are null."""

    run_name: str
    state: State
    owner: str  # the user who started the run
    behind: str | None  # the run that this one is queued behind
    line: NotRequired[str]  # the pool in whose line it is queued; missing if the stack has one pool
    started: str  # of the command
    updated: str
    step: int | None  # steps done since the start of the training
    end: dict[str, Any] | None  # see tracking/end.py; its steps may be those that the script prints
    loss: float | None  # the last one that the script logged, or printed if it reports nothing
    metrics: dict[str, float | None]  # the last value of each; null for one that was not finite
    workers: int | None
    cost_usd: float | None  # of this command's workers so far, on these instances
    earlier: Earlier
    max_hours: float | None
    max_usd: float | None
    spent: Spent
    restarts: list[Restarted]  # of all commands
    starts: list[Start]  # of all commands, but for restarts that did not wait for a node
    extents: list[dict[str, Any]]  # of the first start and of the furthest one: see run/extent.py
    instances: list[InstanceCost] | None
    job: str | None  # Ray's submission ID
    url: str | None  # the run's page at an experiment tracker, such as W&B or MLflow
    error: str | None  # why the run failed, or reached its limit, on one line
    next: str  # the command that resumes the run
    pool: NotRequired[Pool]  # missing without a stack, and if the run chooses none
    slow: NotRequired[list[SlowTime]]  # of all commands; missing, as `waits`, if the script joins no collectives
    waits: NotRequired[list[Wait]]  # now, by rank
    pools: NotRequired[list[str]]  # names of all in which the run has waited or trained, in order


class RunRecord:
    """Writer of the status, log and report of one command on a run."""

    def __init__(self, storage: RunStorage, config: RunConfig) -> None:
        self.owner = job_metadata().get(OWNER) or user_name()
        self.behind: str | None = None  # the run that this one is queued behind
        self.line = ""  # the pool in whose line that is; empty if the stack has one pool
        self.pool: Pool | None = None
        self.pools: list[str] = []  # names of all in which its commands have waited or trained
        self.earlier = earlier_of(None)  # commands of the run
        # Of all commands: until the run trains, of those before.
        self.spent: Callable[[], Spent] = lambda: {"seconds": 0.0, "usd": 0.0, "hourly_usd": 0.0}
        self.restarts: list[Restarted] = []
        self.starts = Starts()
        self.extents: list[dict[str, Any]] = []
        self.slow: list[SlowTime] = []
        self.waits: list[Wait] = []
        self._storage = storage
        self._config = config
        self._next = shlex.join(config.next_command())
        self._started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        self._log = RunLog(storage, self._started)
        self._lock = threading.Lock()  # of the state; not held during a request, so that the driver does not wait
        self._writing = threading.Lock()
        self._is_ours: Callable[[], bool] = lambda: True
        self._state: State | None = None
        self._error: str | None = None
        self._before: bytes | None = None
        self._monitor: RunMonitor | None = None
        self._hours: Mapping[InstanceKind, float] = {}
        self._instances: Callable[[], Mapping[InstanceKind, int]] = dict
        self._end_log = EndLog(time.monotonic())
        self.workers: int | None = None  # of a Ray program, once it has started some

    @contextmanager
    def closing(self, is_ours: Callable[[], bool]) -> Generator[None]:
        """Write the final status when the block ends: a refused run has failed, unless an earlier command has left one.

        `is_ours` returns False once another command has taken the run over.
        """
        self._is_ours = is_ours
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    @contextmanager
    def queued(self) -> Generator[None]:
        """Write the state `queued` until the block ends; `behind` is the run ahead, and `line` the pool."""
        try:
            with self._updating("queued"):
                yield
        finally:
            self.behind, self.line = None, ""

    def refuse(self, error: TrainingError) -> None:
        """Write the final status of a run that is refused before it has its lock, unless another command has that."""
        with suppress(OSError):
            if not self._storage.exists(layout.LOCK):
                self._close(error)

    def end_dead(self, error: LimitReached) -> None:
        """Write the state `limit` over that of a driver that has died, with the run's totals and its last progress.

        A run that has ended otherwise keeps its status.
        """
        with self._writing, suppress(Exception):  # others may have written it
            status = self._storage.read_json(layout.STATUS)
            if status["state"] in layout.UNDER_WAY and self._is_ours():
                own = {"spent": self.spent(), "job": submission_id(), "next": shlex.join(error.next_command)}
                self._storage.write_json(layout.STATUS, {**status, **own, "state": "limit", "error": one_line(error)})
                write_report(self._storage)

    def waiting(self) -> AbstractContextManager[None]:
        """Write the state `waiting` until the block ends: the run waits for workers."""
        return self._updating("waiting")

    @contextmanager
    def training(
        self,
        monitor: RunMonitor,
        hours: Mapping[InstanceKind, float],
        workers: int | None,
        instances: Callable[[], Mapping[InstanceKind, int]] = dict,
    ) -> Generator[None]:
        """Write the state `training` and the progress until the block ends, and store the log.

        The caller keeps counting the hours of the instances; `instances` returns their numbers now. `workers` is None
        if a Ray program starts them.
        """
        self._monitor, self._hours, self.workers, self._instances = monitor, hours, workers, instances
        self._end_log = EndLog(time.monotonic(), self._config.max_hours, self._config.max_usd)
        with self._updating("training"), run_every(LOG_SECONDS, self._log.store, "run log"):
            yield

    @property
    def is_waiting(self) -> bool:
        """True while the state is `waiting`."""
        return self._state == "waiting"

    def note_pool(self, pool: Pool) -> None:
        """Note the pool to which the run goes."""
        self.pool = pool
        if pool["name"] not in self.pools:
            self.pools.append(pool["name"])

    def note_waiting(self, is_waiting: bool) -> None:
        """Change the state of a run that trains: it waits for resources, or has them again."""
        with self._lock:
            if self._state in layout.UNDER_WAY:
                self._state = "waiting" if is_waiting else "training"

    def status(self) -> Status:
        """Return the current status."""
        monitor = self._monitor or RunMonitor()
        history, step = monitor.history, monitor.step
        if step is None and history:
            step = history[-1]["step"]
        # Numbers that the script has printed, without reporting them.
        printed = monitor.guess if step is None and not history else {}
        cost = cost_of(dict(self._hours))
        now = datetime.now(UTC)
        status: Status = {
            "run_name": self._storage.run_name,
            "state": self._state or "waiting",
            "owner": self.owner,
            "behind": self.behind,
            "started": self._started.isoformat(timespec="milliseconds"),
            "updated": now.isoformat(timespec="milliseconds"),
            "step": printed.get("step") if step is None else step,
            "end": None,
            "loss": _last_loss(history) if history else printed.get("loss"),
            "metrics": {name: value for name, value in monitor.metrics.items() if name not in ("step", "time")},
            "workers": self.workers,
            "cost_usd": cost and cost["usd"],
            "earlier": self.earlier,
            "max_hours": self._config.max_hours or None,
            "max_usd": self._config.max_usd or None,
            "spent": self.spent(),
            "restarts": self.restarts,
            "starts": self.starts.documents(now.timestamp()),
            "extents": self.extents,
            "instances": cost and cost["instances"],
            "job": submission_id(),
            "url": monitor.url,
            "error": self._error,
            "next": self._next,
        }
        if end := self._end(monitor, status):
            status["end"] = asdict(end)
        if self.line:
            status["line"] = self.line
        if self.pool:
            status["pool"], status["pools"] = self.pool, self.pools
        if self.waits or self.slow:
            status["slow"], status["waits"] = self.slow, self.waits
        return status

    def _end(self, monitor: RunMonitor, status: Status) -> End | None:
        """Return the end of the run; None without steps. It has an estimate only while the scripts run."""
        steps = monitor.steps
        if status["step"] is not None and not (steps and steps.total):
            steps = Steps(status["step"])
        if steps is None:
            return None
        records = monitor.records if self._state == "training" else ()
        hourly = cost_of({kind: float(number) for kind, number in self._instances().items()}) if records else None
        # The account of the limits, in which each hour has its own price; it has dollars also for an unknown price.
        usd = None if total_usd(status, {}) is None else status["spent"]["usd"]
        hourly_usd = status["spent"]["hourly_usd"] if hourly and hourly["usd"] else 0.0
        return end_of(steps, records, time.monotonic(), usd, hourly_usd or None)

    @contextmanager
    def _updating(self, state: State) -> Generator[None]:
        if self._state is None:  # this command has not replaced the status of the one before
            with suppress(OSError):
                self._before = self._storage.read(layout.STATUS)
            with suppress(Exception):  # a broken document does not have totals
                before = parse_json(self._before or b"null")
                self.earlier = earlier_of(before)
                self.restarts[:0] = before["restarts"]
                self.starts.follow(starts_in(before))
                # That of a driver that died ended with it.
                slow = before.get("slow", ())
                self.slow[:0] = [{**each, "until": each["until"] or before["updated"]} for each in slow]
                self.extents += before["extents"]
                self.pools[:0] = [name for name in pools_in(before) if name not in self.pools]
        self._state = state

        def write() -> None:
            with suppress(Exception):
                status = self.status()
                if status["state"] in layout.UNDER_WAY:
                    self._write(status["state"], status)
                if status["state"] == "training":
                    self._say_end(status)

        with run_every(WRITE_SECONDS, write, "run status", at_once=True):
            yield

    def _say_end(self, status: Status) -> None:
        """Print how far the run is, if it is time for that, and a limit that comes before its end."""
        end, now = end_in(status, is_training=True), time.monotonic()
        records = self._monitor.records if self._monitor else ()
        if end is None or not records:
            return
        if line := self._end_log.line(end, now):
            logger.info(line)
        if line := self._end_log.warning(end, status["spent"]["seconds"] / 3600, now, records[0].seconds):
            logger.warning(line)

    def _write(self, state: State, status: Status | None = None) -> bool:
        """Write the status, or the current one, unless the state has changed; return True if it is written."""
        with self._writing, suppress(Exception):
            if self._state == state and self._is_ours():
                self._storage.write_json(layout.STATUS, status or self.status())
                return True
        return False

    def _has_end(self) -> bool:
        """Return whether an earlier command has left a status or results."""
        with suppress(OSError):
            return any(map(self._storage.exists, (layout.STATUS, layout.RESULT)))
        return True

    def _close(self, error: BaseException | None) -> None:
        if not self._is_ours():
            return
        if self._state is None:  # the command has neither waited nor trained
            if not isinstance(error, Exception) or isinstance(error, Interrupted) or self._has_end():
                return
        elif self._monitor is None and isinstance(error, UsageError) and self._before is not None:
            with self._writing, suppress(OSError):  # it was refused, and has changed nothing
                self._state = None
                self._storage.write(layout.STATUS, self._before)
            return
        with self._lock:
            if error is None:
                state: State = "finished"
            elif isinstance(error, Interrupted | KeyboardInterrupt | SystemExit):
                state = "interrupted"
            else:
                state = "limit" if isinstance(error, LimitReached) else "failed"
                reason = error if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
                self._error = one_line(reason)
            if isinstance(error, LimitReached):
                self._next = shlex.join(error.next_command)
            self._state = state
        if not self._write(state):  # the storage doesn't answer, and another attempt would hold up the end
            return
        self._log.store()
        atexit.register(self._log.store)  # for the lines after this
        write_report(self._storage)


def submission_id() -> str | None:
    """Return the submission ID if this process is the driver of a Ray job, else None."""
    return job_metadata().get("job_submission_id")


def job_metadata() -> dict[str, str]:
    """Return the Ray job's metadata if this process is the driver of one, else an empty dict."""
    return json.loads(os.environ.get(JOB_VARIABLE) or "{}").get("metadata") or {}


def _last_loss(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last training loss that the script logged; None before the first, or if it is not finite.

    The newest metrics may be a validation's, so a `train_loss` or `loss` comes before other losses.
    """
    value = None
    for metrics in reversed(history):
        if "train_loss" in metrics or "loss" in metrics:
            value = metrics["train_loss"] if "train_loss" in metrics else metrics["loss"]
            break
        if value is None:
            losses = [metrics[name] for name in metrics if name.endswith("loss")]
            value = losses[-1] if losses else None
    return finite(value)
