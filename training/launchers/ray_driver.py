"""A run from the command to the result: check everything, let Ray Train train, write what came of it."""

import math
import os
import signal
import tempfile
from dataclasses import replace
from typing import Any

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer
from rich.console import Console

from training.checkpoint.resume import (
    check_not_finished,
    check_settings_unchanged,
    has_checkpoint,
    write_settings,
)
from training.config import flag
from training.engine.config import TrainingConfig
from training.engine.recipe import Recipe
from training.errors import Interrupted, StorageError, TrainingError
from training.launchers import ray_cluster, ray_worker
from training.launchers.ray_cluster import WorkerAllocation
from training.monitoring import cloudwatch, failure_report
from training.monitoring.progress_bar import ProgressBar
from training.monitoring.run_state import create_run_state, read_run_state
from training.monitoring.watchdog import Watchdog
from training.run import layout, results
from training.run.storage import RunStorage, short_reason

START_TIMEOUT, LEAST_START_SECONDS = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", 60.0


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
        config, allocation, run_state = _allocate(config, storage, console)
        _print_header(recipe, requested, config, storage, allocation, console)
        summary, first_step = _fit(recipe, config, storage, allocation, run_state, console)
        document = results.write_results(storage, recipe, config, summary, first_step)
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


def _allocate(
    config: TrainingConfig, storage: RunStorage, console: Console
) -> tuple[TrainingConfig, WorkerAllocation, Any]:
    """Find room for the workers and note their number and device in the settings; with them the run's run_state."""
    alone = ray_cluster.connect(config)
    run_state = create_run_state(storage)
    allocation = ray_cluster.wait_for_workers(config, 0 if alone else config.wait_seconds, console)
    number = config.num_workers or allocation.num_workers
    config = replace(config, num_workers=number, device="cuda" if allocation.use_gpu else "cpu")
    check_settings_unchanged(config, storage)
    write_settings(storage, config)
    storage.delete(layout.ERROR)
    return config, allocation, run_state


def _fit(
    recipe: Recipe,
    config: TrainingConfig,
    storage: RunStorage,
    allocation: WorkerAllocation,
    run_state: Any,
    console: Console,
) -> tuple[dict[str, Any], float | None]:
    """Train; what rank 0 returned, and when the first step was done."""
    stalls = Watchdog(run_state, config.stall_timeout, storage, console)
    try:
        with (
            ProgressBar(run_state, config.epochs, recipe.qualities, console),
            cloudwatch.publish_metrics(run_state, config.cloudwatch_namespace, console),
            stalls,
            tempfile.TemporaryDirectory(prefix="ray-train-") as folder,
        ):
            outcome = _fit_until_done(recipe, config, storage, allocation, run_state, folder)
    except TrainingFailedError as cause:
        raise failure_report.describe_failure(cause, config, storage, run_state, stalls) from cause
    state = read_run_state(run_state)
    return outcome, state.first_step if state else None


def _fit_until_done(
    recipe: Recipe,
    config: TrainingConfig,
    storage: RunStorage,
    allocation: WorkerAllocation,
    run_state: Any,
    folder: str,
) -> dict[str, Any]:
    """What rank 0 returned when it had finished; until then start the workers anew each time nodes are taken away."""
    for left in range(config.max_preemptions, -1, -1):
        on_sigint = signal.getsignal(signal.SIGINT)
        try:
            result: Any = _trainer(recipe, config, storage, allocation, run_state, folder, left).fit()
        finally:
            signal.signal(signal.SIGINT, on_sigint)  # Ray Train leaves its own, which no longer ends anything
        if (state := read_run_state(run_state)) and state.fatal_error:
            raise failure_report.fatal_failure(state.fatal_error, config, storage, run_state)
        if ray_worker.PREEMPTED not in result.return_value:
            return result.return_value
    too_often = f"workers were taken away more than {config.max_preemptions} times ({flag('max_preemptions')})"
    raise failure_report.fatal_failure(TrainingError(too_often), config, storage, run_state)


def _trainer(
    recipe: Recipe,
    config: TrainingConfig,
    storage: RunStorage,
    allocation: WorkerAllocation,
    run_state: Any,
    folder: str,
    preemptions: int,
) -> TorchTrainer:
    """Ray Train with the run's workers and its patience; the workers save the checkpoints themselves."""
    # A number of workers that may change is taken from what Ray had when it last looked, just before a node was lost:
    # then it waits in vain, and looks again.
    patience = LEAST_START_SECONDS if allocation.limits else max(config.wait_seconds, LEAST_START_SECONDS)
    os.environ[START_TIMEOUT] = str(patience)
    return TorchTrainer(
        ray_worker.train,
        train_loop_config={"recipe": recipe, "config": config, "storage": storage, "run_state": run_state},
        scaling_config=ScalingConfig(
            num_workers=allocation.limits or allocation.num_workers,
            use_gpu=allocation.use_gpu,
            resources_per_worker=allocation.resources_per_worker,
        ),
        run_config=RunConfig(
            name=storage.run_name,
            storage_path=folder,  # where Ray Train would keep checkpoints if it were given any
            # Without a limit the controller would ask for ever for workers that it can't have; START_TIMEOUT is how
            # long it waits for them, at the start and when a lost node is to be replaced.
            failure_config=FailureConfig(
                max_failures=config.max_failures,
                max_preemption_failures=preemptions,  # those that come without notice
                controller_failure_limit=math.ceil(config.wait_seconds / patience) if allocation.limits else 0,
            ),
            logging_config=LoggingConfig(log_level="WARNING"),
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
    lines = {
        "run": str(config.run_name) + (", continued from its last checkpoint" if has_checkpoint(storage) else ""),
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
