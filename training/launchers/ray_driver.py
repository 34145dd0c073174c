"""A run from the command to the result: check everything, train, restart after failures, write the results."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from rich.console import Console
from rich.markup import escape

from training.checkpoint.resume import (
    check_not_finished,
    check_settings_unchanged,
    keep_device,
    newest_checkpoint,
    write_settings,
)
from training.config import flag
from training.engine.config import TrainingConfig
from training.engine.recipe import Recipe
from training.errors import Interrupted, ResourceError, StorageError, TrainingError, UsageError
from training.launchers import ray_cluster, ray_worker
from training.launchers.ray_cluster import WorkerAllocation
from training.launchers.restart_policy import RestartPolicy
from training.monitoring import cloudwatch, failure_report, post_mortem
from training.monitoring.failure_report import Failure
from training.monitoring.progress_bar import ProgressBar
from training.monitoring.run_monitor import RunMonitor
from training.monitoring.run_state import RunStateClient, create_run_state
from training.run import layout, results
from training.run.lock import hold_lock
from training.run.results import RunSummary
from training.run.storage import RunStorage, short_reason

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
MIN_START_SECONDS = 60.0
# The process group's own time-out is behind the watchdog's, which leaves the stacks.
PROCESS_GROUP_FACTOR = 2.0


def run(recipe: Recipe, config: TrainingConfig, console: Console) -> dict[str, Any]:
    """Train as `config` says and leave the results in the run's folder.

    Returns:
        The document of `result.json`.

    Raises:
        UsageError: A setting, folder or data set can't be used; nothing was created.
        ResourceError: The cluster has no room for the workers.
        TrainingError: Training failed; the checkpoints so far are kept, and `error.json` says what happened.
    """
    requested = config
    config, storage = _prepare(recipe, config)
    try:
        with hold_lock(storage, lambda line: console.print(f"training: {line}", highlight=False, soft_wrap=True)):
            config = keep_device(config, storage)
            is_alone = ray_cluster.connect(config)
            wait_seconds = 0 if is_alone else config.wait_seconds
            allocation = ray_cluster.wait_for_workers(config, wait_seconds, console)
            config = _begin(config, storage, allocation)
            _print_header(recipe, requested, config, storage, allocation, console)
            run_state = create_run_state()
            monitor = RunMonitor(run_state, console)
            summary = Launch(recipe, config, storage, allocation, run_state, monitor, console).fit()
            document = results.write_results(storage, recipe, config, summary, monitor.first_step_at)
    except OSError as cause:
        raise StorageError(
            f"{storage.uri} can't be read or written ({short_reason(cause)}); "
            f"continue with --run-name {config.run_name}"
        ) from cause
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is Ray's own answer to Ctrl-C and SIGTERM
        raise Interrupted(f"interrupted; continue with --run-name {config.run_name}") from stop
    finally:
        ray.shutdown()
    _print_summary(recipe, document, summary["history"], console)
    return document


def _prepare(recipe: Recipe, config: TrainingConfig) -> tuple[TrainingConfig, RunStorage]:
    """Check everything that can be checked without a cluster."""
    config = recipe.prepare(config).resolve_defaults()
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    storage.check_writable()
    check_not_finished(storage)
    return config, storage


def _begin(config: TrainingConfig, storage: RunStorage, allocation: WorkerAllocation) -> TrainingConfig:
    """Put the number of workers and their device into the settings, and write these into the run's folder."""
    number = config.num_workers or allocation.num_workers
    config = replace(config, num_workers=number).resolve_device("cuda" if allocation.use_gpu else "cpu")
    check_settings_unchanged(config, storage)
    write_settings(storage, config)
    storage.delete(layout.ERROR)
    return config


@dataclass(frozen=True)
class Launch:
    """Starts the workers, again after each failure that the restart policy allows."""

    recipe: Recipe
    config: TrainingConfig
    storage: RunStorage
    allocation: WorkerAllocation
    run_state: RunStateClient
    monitor: RunMonitor
    console: Console

    def fit(self) -> RunSummary:
        """Train to the end; returns what rank 0 returned.

        Raises:
            TrainingError: The run can't continue; `error.json` says why, unless it is the user's mistake.
        """
        qualities = self.recipe.qualities
        with (
            tempfile.TemporaryDirectory(prefix="ray-train-") as folder,
            ProgressBar(self.monitor, self.config.epochs, qualities, self.console) as bar,
            cloudwatch.publish_metrics(self.monitor, self.config.cloudwatch_namespace, qualities, self.console),
            self.monitor.polling(bar.draw),
        ):
            return self._fit_until_done(folder)

    def _fit_until_done(self, folder: str) -> RunSummary:
        policy = RestartPolicy(self.config.max_failures, partial(newest_checkpoint, self.storage))
        waiting_since: float | None = None
        while True:
            try:
                result: Any = self._fit_once(folder)
            except (TrainingFailedError, RayError) as error:
                ray_cluster.release_workers()
                waiting_since = self._check_start_timeout(error, waiting_since)
                if waiting_since is None:
                    self._check_failure(error, policy)
                continue
            waiting_since = None
            if ray_worker.PREEMPTED not in result.return_value:
                return result.return_value
            self._check_preemption(policy)

    def _fit_once(self, folder: str) -> Any:
        on_sigint = signal.getsignal(signal.SIGINT)
        try:
            return self._trainer(folder).fit()
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
        if time.monotonic() - since < self.config.wait_seconds:
            return since
        if self.monitor.progress is None:
            raise ResourceError(
                f"the cluster has the {self.config.num_workers} workers' CPUs and GPUs, but they were not free within "
                f"{self.config.wait_seconds:.0f} s; wait for the other run to end, or ask for fewer workers"
            )
        what = f"workers that were lost did not come back within {self.config.wait_seconds:g} s"
        failure = Failure(error, what, where=str(error))
        raise failure_report.write_error(failure, str(failure), self.config, self.storage)

    def _check_failure(self, error: TrainingFailedError | RayError, policy: RestartPolicy) -> None:
        """Print a line if the run continues after a failure.

        Raises:
            TrainingError: It doesn't.
        """
        workers = post_mortem.collect(self.storage.uri)
        failure = failure_report.describe_failure(error, workers, self.config, self.storage)
        if isinstance(failure.cause, UsageError):
            raise failure.cause
        if isinstance(failure.cause, TrainingError):  # a restart can't fix it
            raise failure_report.write_error(failure, failure.what, self.config, self.storage) from error
        if not policy.survives_failure():
            line = str(failure)
            if policy.failures > 1:
                line += f" ({policy.failures} failures without a new checkpoint in between)"
            raise failure_report.write_error(failure, line, self.config, self.storage) from error
        stacks = f", stacks in {failure.stacks}" if failure.stacks else ""
        self._say(
            f"{failure}{stacks}; restarting from {self._resumes_from()} (failure {policy.failures} without a new "
            f"checkpoint in between, {flag('max_failures')} is {policy.max_failures})"
        )

    def _check_preemption(self, policy: RestartPolicy) -> None:
        if not policy.survives_preemption():
            what = f"nodes were reclaimed {policy.failures} times without a new checkpoint in between"
            failure = Failure(TrainingError(what), what)
            raise failure_report.write_error(failure, what, self.config, self.storage)
        self._say(f"nodes are being reclaimed; restarting from {self._resumes_from()}")

    def _say(self, line: str) -> None:
        self.console.print(escape(f"training: {line}"), highlight=False, soft_wrap=True)

    def _resumes_from(self) -> str:
        try:
            return newest_checkpoint(self.storage) or "the beginning"
        except OSError:
            return "the last checkpoint"

    @property
    def _start_seconds(self) -> float:
        """How long Ray Train waits for the workers' resources.

        An elastic worker group is sized from Ray's last view of the cluster, which may still contain a lost node. A
        short timeout makes Ray look again.
        """
        return MIN_START_SECONDS if self.allocation.limits else max(self.config.wait_seconds, MIN_START_SECONDS)

    def _trainer(self, folder: str) -> TorchTrainer:
        """Ray Train with the run's workers; the restart policy is ours, and the workers save their checkpoints."""
        os.environ[START_TIMEOUT] = str(self._start_seconds)
        return TorchTrainer(
            ray_worker.train,
            train_loop_config={
                "recipe": self.recipe,
                "config": self.config,
                "storage": self.storage,
                "run_state": self.run_state,
            },
            torch_config=TorchConfig(timeout_s=int(PROCESS_GROUP_FACTOR * self.config.stall_timeout) + 1),
            scaling_config=ScalingConfig(
                num_workers=self.allocation.limits or self.allocation.num_workers,
                use_gpu=self.allocation.use_gpu,
                resources_per_worker=self.allocation.resources_per_worker,
            ),
            run_config=RunConfig(
                name=self.storage.run_name,
                storage_path=folder,  # where Ray Train would keep checkpoints if it were given any
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
                logging_config=LoggingConfig(log_level="CRITICAL"),  # what it would show, the restart's line says
            ),
        )


def _print_header(
    recipe: Recipe,
    requested: TrainingConfig,
    config: TrainingConfig,
    storage: RunStorage,
    allocation: WorkerAllocation,
    console: Console,
) -> None:
    continued = ", continued from its last checkpoint" if newest_checkpoint(storage) else ""
    lines = {
        "run": f"{config.run_name}{continued}",
        **recipe.describe(requested, config),
        "workers": f"{allocation}, batch size {config.batch_size} each",
        "results": storage.uri,
    }
    for name, value in lines.items():
        console.print(f"[bold]{name:<9}[/]{value}", highlight=False, soft_wrap=True)


def _print_summary(recipe: Recipe, document: dict[str, Any], history: list[Any], console: Console) -> None:
    console.print(results.table(document, recipe, history))
    name = recipe.score.replace("_", " ")
    console.print(
        f"{name} [bold]{document['metrics'][recipe.score]:.4f}[/] over all {document['data']['test_samples']:,} test "
        f"samples, {document['times']['total_seconds']:.0f} s in total",
        highlight=False,
    )
    files = ", ".join([layout.RESULT, *document["files"].values()])
    console.print(f"results in {document['storage_path']}: {files}", highlight=False, soft_wrap=True)
