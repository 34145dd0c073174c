"""Workers of a run on Ray Train, restarted after each failure that the failure policy allows.

Ray Train's `fit` runs in a background thread. The main thread handles signals and polls the scripts.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, ScalingConfig, TrainingFailedError
from ray.train import RunConfig as TrainRunConfig

from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig
from ray_on_ecs.errors import ResourceError, ScriptError, one_line
from ray_on_ecs.run import admission, failure_report, ray_cluster, worker_dump
from ray_on_ecs.run.backend import ScriptBackend
from ray_on_ecs.run.failure_policy import Failure, FailurePolicy, Mark, Raise, Restart, Wait
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.program import resources as program_resources
from ray_on_ecs.run.program.resources import Needs, ProgramWatch
from ray_on_ecs.run.ray_cluster import WorkerAllocation
from ray_on_ecs.run.ray_private import START_TIMEOUT, Trainer
from ray_on_ecs.run.script_group import POLL_SECONDS, Decider, ScriptGroup
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import cloudwatch
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.run_record import RunRecord

logger = logging.getLogger(__name__)

MIN_START_SECONDS = 60.0  # processes need some time to start, whatever --worker-timeout says
# Workers that have places for so long, and not begun, are started again: Ray Train waits without a limit for one whose
# process was stopped by the system, or hangs in an import.
BEGIN_SECONDS, LOOK_SECONDS = 300.0, 5.0
RECLAIMED = Failure("nodes are being reclaimed", "reclaimed")


def wait_for_workers(config: RunConfig, record: RunRecord) -> WorkerAllocation:
    """Wait until the cluster has room; a run for which it has room at once is never shown as waiting.

    Not on the Ray that `run --local` started, which no other node can join.

    Raises:
        ResourceError: The cluster still lacks room after `seconds`.
    """
    seconds = 0.0 if LOCAL_VARIABLE in os.environ else config.worker_timeout
    with suppress(ResourceError):
        return ray_cluster.wait_for_workers(config, 0)
    with record.waiting() if seconds else nullcontext():
        return ray_cluster.wait_for_workers(config, seconds)


@dataclass(frozen=True)
class TrainFunction:
    """The function that Ray Train runs on every worker, and the driver's view of it.

    Attributes:
        function: Takes the settings.
        settings: The function's argument.
        mark: Returns the progress of the run, for the failure policy.
        newest_checkpoint: Returns the name of what a restart would continue from, or None.
        scripts: Makes what directs the workers' scripts.
    """

    function: Callable[[Any], Any]
    settings: Mapping[str, Any]
    mark: Callable[[], Mark]
    newest_checkpoint: Callable[[], str | None]
    scripts: Callable[[Decider], ScriptGroup]


@dataclass(frozen=True)
class Attempts:
    """Starts the workers, and restarts them after each failure that the failure policy allows.

    Attributes:
        train_function: The function that the workers run.
        config: The run's settings.
        storage: The run's folder.
        allocation: The workers, or None if the function runs in a thread of this process and starts workers itself.
        monitor: Reads how far they are.
        record: Records that in the run's folder.
        instance_hours: Counts the hours of their instances.
        wait_seconds: How long a Ray program may wait for its workers.
    """

    train_function: TrainFunction
    config: RunConfig
    storage: RunStorage
    allocation: WorkerAllocation | None
    monitor: RunMonitor
    record: RunRecord
    instance_hours: InstanceHours = field(default_factory=InstanceHours)
    wait_seconds: float = math.inf

    def fit(self) -> Any:
        """Run to the end; returns what rank 0 returned.

        Raises:
            TrainingError: The run can't continue; the reason is in `error.json`, unless it is the user's mistake.
        """
        if self.allocation:
            num_workers = self.allocation.num_workers
            watching_nodes = ray_cluster.zone_failover(self.allocation)
        else:
            num_workers = None
            watching_nodes = self._program.running()
        with (
            tempfile.TemporaryDirectory(prefix="ray-train-") as folder,
            cloudwatch.publish_metrics(self.monitor, self.config.cloudwatch_namespace),
            self.monitor.polling(),
            self.instance_hours.running(),
            self.record.training(self.monitor, self.instance_hours.by_kind, num_workers),
            watching_nodes,
        ):
            return self._fit_until_done(folder)

    @cached_property
    def _program(self) -> ProgramWatch:
        def note_waiting(needs: Needs) -> None:
            self.record.note_waiting(bool(needs))
            if needs:
                what = program_resources.describe(needs)
                logger.info(f"the program waits for {what}; {ray_cluster.describe_nodes()}")

        return ProgramWatch(note_waiting)

    def _fit_until_done(self, folder: str) -> Any:
        policy = FailurePolicy(
            self.config.max_restarts, self.train_function.mark, worker_timeout=self.config.worker_timeout
        )
        scripts = self.train_function.scripts(self._decider(policy))
        while True:
            try:
                result: Any = self._fit_once(folder, scripts)
            except (TrainingFailedError, RayError, OSError, ScriptError) as error:
                if isinstance(error, OSError | ScriptError) and self.allocation:
                    raise
                if scripts.error:
                    raise scripts.error from error
                ray_cluster.release_workers()
                # A node may have gone before its deadline.
                failure = RECLAIMED if scripts.is_reclaimed else self._describe(error, policy)
                self._decide(policy, failure, error)
            else:
                if scripts.error:
                    raise scripts.error
                if not scripts.is_reclaimed:
                    return result
                self._decide(policy, RECLAIMED)
            logger.debug("requesting workers again")
            scripts.new_fit()

    def _fit_once(self, folder: str, scripts: ScriptGroup) -> Any:
        """Call Ray Train's `fit`, or the function itself, and direct the scripts meanwhile; return rank 0's result.

        Raises:
            Stop: The user stopped the run; its scripts have ended, or have had the time for it.
        """
        fit = _Call(partial(self._fit, folder))
        watch = BeginWatch(ray_cluster.has_places)
        try:
            while not fit.wait(POLL_SECONDS):
                scripts.poll()
                if watch.is_over(has_begun=scripts.has_workers):
                    logger.warning(f"the workers have not begun within {BEGIN_SECONDS:.0f} s; ending them")
                    ray_cluster.release_workers()
                if self.allocation is None:
                    shortage = self._program.shortage(self.wait_seconds)
                    if shortage:
                        scripts.stop(ResourceError(shortage))
        except KeyboardInterrupt as stop:
            scripts.stop(admission.interrupted(self.config, stop))
            while not fit.wait(POLL_SECONDS) and time.time() < scripts.waits_until:
                scripts.poll()
            raise
        return fit.result()

    def _fit(self, folder: str) -> Any:
        if self.allocation is None:
            return self.train_function.function(
                {**self.train_function.settings, "is_waiting": self._program.is_waiting}
            )
        result: Any = self._trainer(folder, self.allocation).fit()
        return result.return_value

    def _decider(self, policy: FailurePolicy) -> Decider:
        def decide(failure: Failure) -> None:
            self.monitor.poll()
            is_reclaimed = self.allocation is None and failure.kind == "failed" and self._program.was_reclaimed()
            self._decide(policy, RECLAIMED if is_reclaimed else failure)

        def store_stacks(stacks: dict[int, str]) -> str:
            try:
                return failure_report.store_stacks(stacks, self.storage)
            except OSError as cause:
                return f"no place: they could not be stored ({short_reason(cause)})"

        def began() -> None:
            logger.debug("all scripts have been started")
            policy.began()
            if self.allocation:  # a Ray program's watch updates the state
                self.record.note_waiting(False)

        return Decider(began, decide, store_stacks)

    def _describe(self, error: Exception, policy: FailurePolicy) -> Failure:
        """Return why Ray Train has ended the workers, or why a Ray program could not be started."""
        if not isinstance(error, TrainingFailedError | RayError):
            return Failure(one_line(error), cause=error)
        if not failure_report.is_start_timeout(error):
            return failure_report.describe_failure(error, worker_dump.collect(self.storage.uri))
        if self.allocation and ray_cluster.has_nodes(self.allocation):
            return Failure("other jobs use the CPUs and GPUs of the cluster", "busy", where=str(error))
        event = "lost did not come back" if policy.has_begun else "requested did not join the cluster"
        what = f"workers that were {event} within {self.config.worker_timeout:g} s"
        return Failure(what, "no workers", where=str(error))

    def _decide(self, policy: FailurePolicy, failure: Failure, cause: BaseException | None = None) -> None:
        """Print a line if the run continues after a failure.

        Raises:
            TrainingError: It doesn't.
        """
        decision = policy.decide(failure)
        if not isinstance(decision, Wait):  # which is decided again and again
            logger.debug(f"{failure.kind}, {failure}: {type(decision).__name__}")
        if failure.kind == "busy":  # the run is shown as waiting until its workers begin
            if not self.record.is_waiting:
                logger.info(f"waiting: {failure.what}")
            self.record.note_waiting(True)
        if isinstance(decision, Raise):
            raise failure_report.write_error(failure, decision, self.config, self.storage) from cause
        if isinstance(decision, Restart):
            what = failure.what if failure.kind == "reclaimed" else str(failure)
            stacks = f", stacks in {failure.stacks}" if failure.stacks else ""
            count = f" ({decision.count})" if decision.count else ""
            logger.warning(f"{what}{stacks}; restarting from {self._resumes_from()}{count}")

    def _resumes_from(self) -> str:
        try:
            return self.train_function.newest_checkpoint() or "the beginning"
        except OSError:
            return "where the run was"

    def _trainer(self, folder: str, allocation: WorkerAllocation) -> Trainer:
        """Return Ray Train with the run's workers; the restart policy is ours, and the workers save what they need."""
        start_seconds = max(self.config.worker_timeout, MIN_START_SECONDS)
        if allocation.limits:
            # An elastic worker group is sized from Ray's last view of the cluster, which may still contain a lost node.
            # A short timeout makes Ray look again.
            start_seconds = MIN_START_SECONDS
        os.environ[START_TIMEOUT] = str(start_seconds)
        return Trainer(
            self.train_function.function,
            train_loop_config=dict(self.train_function.settings),
            backend_config=ScriptBackend(),
            scaling_config=ScalingConfig(
                num_workers=allocation.limits or allocation.num_workers,
                use_gpu=allocation.use_gpu,
                resources_per_worker=allocation.resources_per_worker,
                label_selector=allocation.node_labels or None,
            ),
            run_config=TrainRunConfig(
                name=self.storage.run_name,
                storage_path=folder,  # where Ray Train would keep checkpoints if it were given any
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
                logging_config=LoggingConfig(log_level="CRITICAL"),  # the restart's line has what it would show
            ),
        )


class BeginWatch:
    """The time that workers have to begin, from when they have places."""

    def __init__(self, has_places: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._has_places = has_places
        self._clock = clock
        self._looked_at = self._placed_at = -math.inf

    def is_over(self, *, has_begun: bool) -> bool:
        """Return whether the time is over. It starts again then, and when the workers lose their places."""
        now = self._clock()
        if has_begun or now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        if not self._has_places():
            self._placed_at = -math.inf
        elif self._placed_at == -math.inf:
            self._placed_at = now
        elif now - self._placed_at > BEGIN_SECONDS:
            self._placed_at = -math.inf
            return True
        return False


class _Call:
    """A call on a daemon thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name="fit", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it has ended."""
        return self._has_ended.wait(seconds)

    def result(self) -> Any:
        """Return what it has returned, or raise what it has raised."""
        if self._error:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._has_ended.set()
