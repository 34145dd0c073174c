"""The workers of a run on Ray Train: started, and started again after each failure that the restart policy allows."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.backend import BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from rich.console import Console
from rich.markup import escape

from ray_on_ecs import config as settings
from ray_on_ecs.errors import Interrupted, ResourceError, StorageError, TrainingError, UsageError
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.run import failure_report, ray_cluster, worker_dump
from ray_on_ecs.run.failure_report import Failure
from ray_on_ecs.run.instance_hours import InstanceMeter
from ray_on_ecs.run.preemption import PREEMPTED
from ray_on_ecs.run.ray_cluster import WorkerAllocation
from ray_on_ecs.run.restart_policy import RestartPolicy
from ray_on_ecs.tracking import cloudwatch
from ray_on_ecs.tracking.lock import hold_lock
from ray_on_ecs.tracking.progress_bar import ProgressBar
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.run_record import RunRecord
from ray_on_ecs.tracking.storage import RunStorage

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
MIN_START_SECONDS = 60.0


@contextmanager
def hold_run(
    config: settings.RunConfig,
    storage: RunStorage,
    record: RunRecord,
    console: Console,
    runtime_env: Mapping[str, Any] | None = None,
) -> Generator[WorkerAllocation]:
    """Hold a run's lock and its place on a cluster, until the block ends.

    Args:
        config: The run's settings.
        storage: The run's folder.
        record: Says in that folder that the run waits, and at the end how it has ended.
        console: Shows what the run waits for.
        runtime_env: Ray's runtime environment of the workers on a cluster that is not this machine alone.

    Yields:
        The allocation of the workers.

    Raises:
        UsageError: Another command trains the run.
        ResourceError: The cluster has no room for the workers.
        StorageError: The storage failed within the block.
        Interrupted: The user stopped it.
    """

    def say(line: str) -> None:
        console.print(escape(f"ray-on-ecs: {line}"), highlight=False, soft_wrap=True)

    try:
        with hold_lock(storage, say) as lock, record.closing(lambda: lock.is_held, say):
            is_alone = ray_cluster.connect(config, runtime_env or {})
            yield _wait_for_workers(config, 0 if is_alone else config.worker_timeout, record, console)
    except OSError as cause:
        raise StorageError(
            f"{storage.uri} can't be read or written ({short_reason(cause)}); "
            f"continue with --run-name {config.run_name}"
        ) from cause
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is Ray's own answer to Ctrl-C and SIGTERM
        raise Interrupted(f"interrupted; continue with --run-name {config.run_name}") from stop
    finally:
        ray.shutdown()


def _wait_for_workers(
    config: settings.RunConfig, seconds: float, record: RunRecord, console: Console
) -> WorkerAllocation:
    """Wait until the cluster has room; the folder of a run for which it has room at once never says that it waits.

    Raises:
        ResourceError: The cluster has no room after `seconds`.
    """
    with suppress(ResourceError):
        return ray_cluster.wait_for_workers(config, 0, console)
    with record.waiting() if seconds else nullcontext():
        return ray_cluster.wait_for_workers(config, seconds, console)


@dataclass(frozen=True)
class Work:
    """What a launch starts on every worker.

    Attributes:
        loop: Runs on every worker, with the settings; a result of rank 0 with `PREEMPTED` means that it goes on.
        settings: What the loop needs.
        backend: What Ray Train prepares before the loop.
        newest_checkpoint: Returns the name of what a restart would continue from, or None; another name is progress.
        epochs: How many there are, or None.
        line: Returns the line to show for new metrics, or None for no line.
        metric_names: CloudWatch's names of the metrics; None for all metrics.
        progress: What the user calls the progress by `newest_checkpoint`.
    """

    loop: Callable[[Any], Any]
    settings: Mapping[str, Any]
    backend: BackendConfig
    newest_checkpoint: Callable[[], str | None]
    epochs: int | None = None
    line: Callable[[Any], str | None] = lambda metrics: None
    metric_names: Mapping[str, str] | None = None
    progress: str = "a new checkpoint"


@dataclass(frozen=True)
class Launch:
    """Starts the workers, again after each failure that the restart policy allows.

    Attributes:
        work: What they do.
        config: The run's settings.
        storage: The run's folder.
        allocation: The workers.
        monitor: Knows how far they are.
        record: Says so in the run's folder.
        console: Shows the progress, and each failure.
        meter: Counts the hours of their instances.
    """

    work: Work
    config: settings.RunConfig
    storage: RunStorage
    allocation: WorkerAllocation
    monitor: RunMonitor
    record: RunRecord
    console: Console
    meter: InstanceMeter = field(default_factory=InstanceMeter)

    def fit(self) -> Any:
        """Run to the end; returns what rank 0 returned.

        Raises:
            TrainingError: The run can't continue; `error.json` says why, unless it is the user's mistake.
        """
        namespace, names = self.config.cloudwatch_namespace, self.work.metric_names
        with (
            tempfile.TemporaryDirectory(prefix="ray-train-") as folder,
            ProgressBar(self.monitor, self.console, self.work.epochs, self.work.line) as bar,
            cloudwatch.publish_metrics(self.monitor, namespace, names, self.console),
            self.monitor.polling(bar.draw),
            self.meter.running(),
            self.record.training(self.monitor, self.meter.hours, self.allocation.num_workers),
            ray_cluster.watching_capacity(self.console, self.allocation),
        ):
            return self._fit_until_done(folder)

    def _fit_until_done(self, folder: str) -> Any:
        policy = RestartPolicy(self.config.max_restarts, self.work.newest_checkpoint)
        waiting_since: float | None = None
        for attempt in itertools.count():
            try:
                result: Any = self._fit_once(folder, attempt)
            except (TrainingFailedError, RayError) as error:
                ray_cluster.release_workers()
                waiting_since = self._check_start_timeout(error, waiting_since)
                if waiting_since is None:
                    self._check_failure(error, policy)
                continue
            waiting_since = None
            if PREEMPTED not in result.return_value:
                return result.return_value
            self._check_preemption(policy)

    def _fit_once(self, folder: str, attempt: int) -> Any:
        on_sigint = signal.getsignal(signal.SIGINT)
        try:
            return self._trainer(folder, attempt).fit()
        finally:
            signal.signal(signal.SIGINT, on_sigint)  # Ray Train leaves its own, which no longer ends anything

    def _check_start_timeout(self, error: BaseException, waiting_since: float | None) -> float | None:
        """Return since when the run has been waiting for workers, if that is what the error says, else None.

        Raises:
            ResourceError: The workers never started.
            TrainingError: Workers that were lost did not come back in time.
        """
        cause = error.controller_failure if isinstance(error, ControllerError) else None
        if type(cause).__name__ != "WorkerGroupStartupTimeoutError":  # of Ray's internals: it has no public name
            return None
        since = waiting_since or time.monotonic() - self._start_seconds
        if time.monotonic() - since < self.config.worker_timeout:
            return since
        if self.monitor.progress is None:
            raise ResourceError(
                f"the cluster has the {self.config.num_workers} workers' CPUs and GPUs, but they were not free within "
                f"{self.config.worker_timeout:.0f} s; wait for the other run to end, or ask for fewer workers"
            )
        what = f"workers that were lost did not come back within {self.config.worker_timeout:g} s"
        failure = Failure(error, what, where=str(error))
        raise failure_report.write_error(failure, str(failure), self.config, self.storage)

    def _check_failure(self, error: TrainingFailedError | RayError, policy: RestartPolicy) -> None:
        """Print a line if the run continues after a failure.

        Raises:
            TrainingError: It doesn't.
        """
        workers = worker_dump.collect(self.storage.uri)
        failure = failure_report.describe_failure(error, workers, self.config, self.storage)
        if isinstance(failure.cause, UsageError):
            raise failure.cause
        if isinstance(failure.cause, TrainingError):  # a restart can't fix it
            raise failure_report.write_error(failure, failure.what, self.config, self.storage) from error
        if not policy.survives_failure():
            line = str(failure)
            if policy.failures > 1:
                line += f" ({policy.failures} failures without {self.work.progress} in between)"
            raise failure_report.write_error(failure, line, self.config, self.storage) from error
        stacks = f", stacks in {failure.stacks}" if failure.stacks else ""
        self._say(
            f"{failure}{stacks}; restarting from {self._resumes_from()} (failure {policy.failures} without "
            f"{self.work.progress} in between, {settings.flag('max_restarts')} is {policy.max_restarts})"
        )

    def _check_preemption(self, policy: RestartPolicy) -> None:
        if not policy.survives_preemption():
            what = f"nodes were reclaimed {policy.failures} times without {self.work.progress} in between"
            failure = Failure(TrainingError(what), what)
            raise failure_report.write_error(failure, what, self.config, self.storage)
        self._say(f"nodes are being reclaimed; restarting from {self._resumes_from()}")

    def _say(self, line: str) -> None:
        self.console.print(escape(f"ray-on-ecs: {line}"), highlight=False, soft_wrap=True)

    def _resumes_from(self) -> str:
        try:
            return self.work.newest_checkpoint() or "the beginning"
        except OSError:
            return "where the run was"

    @property
    def _start_seconds(self) -> float:
        """How long Ray Train waits for the workers' resources.

        An elastic worker group is sized from Ray's last view of the cluster, which may still contain a lost node. A
        short timeout makes Ray look again.
        """
        return MIN_START_SECONDS if self.allocation.limits else max(self.config.worker_timeout, MIN_START_SECONDS)

    def _trainer(self, folder: str, attempt: int) -> DataParallelTrainer:
        """Ray Train with the run's workers; the restart policy is ours, and the workers save what they need."""
        os.environ[START_TIMEOUT] = str(self._start_seconds)
        return DataParallelTrainer(
            self.work.loop,
            train_loop_config={**self.work.settings, "attempt": attempt},
            backend_config=self.work.backend,
            scaling_config=ScalingConfig(
                num_workers=self.allocation.limits or self.allocation.num_workers,
                use_gpu=self.allocation.use_gpu,
                resources_per_worker=self.allocation.resources_per_worker,
                label_selector=self.allocation.node_labels or None,
            ),
            run_config=RunConfig(
                name=self.storage.run_name,
                storage_path=folder,  # where Ray Train would keep checkpoints if it were given any
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
                logging_config=LoggingConfig(log_level="CRITICAL"),  # what it would show, the restart's line says
            ),
        )
