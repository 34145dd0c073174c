"""A run of a recipe from the command to the result: check everything, train, write the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from ray_on_ecs.checkpoint.resume import (
    check_not_finished,
    check_settings_unchanged,
    keep_device,
    newest_checkpoint,
    write_settings,
)
from ray_on_ecs.run.attempts import Attempts, TrainFunction, hold_run, wait_for_workers
from ray_on_ecs.run.failure_policy import Mark
from ray_on_ecs.run.ray_cluster import WorkerAllocation, may_start_helpers
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.cloudwatch import SPEED
from ray_on_ecs.tracking.cost import cost_line, cost_of
from ray_on_ecs.tracking.run_actor import create_run_actor
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.run_record import RunRecord
from ray_on_ecs.tracking.storage import RunStorage
from training import ray_worker, results
from training.engine.config import TrainingConfig
from training.engine.recipe import Quality, Recipe

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
    config = keep_device(config, storage)
    record = RunRecord(storage, recipe.name, requested, config, config.epochs)
    with hold_run(config, storage, record, console) as seconds:
        allocation = wait_for_workers(config, seconds, record, console)
        config = _begin(config, storage, allocation)
        _print_header(recipe, requested, config, storage, allocation, console)
        run_state = create_run_actor()
        monitor = RunMonitor(run_state, console)
        train_function = TrainFunction(
            ray_worker.train,
            {
                "recipe": recipe,
                "config": config,
                "storage": storage,
                "run_state": run_state,
                "uses_helpers": allocation.leaves_helpers,
                "may_start_helpers": may_start_helpers(),
            },
            ray_worker.RoutedTorchConfig(timeout_s=int(PROCESS_GROUP_FACTOR * config.hang_timeout) + 1),
            partial(_mark, storage),
            partial(newest_checkpoint, storage),
            config.epochs,
            partial(_epoch_line, epochs=config.epochs, qualities=recipe.qualities),
            metric_names(recipe.qualities),
        )
        attempts = Attempts(train_function, config, storage, allocation, monitor, record, console)
        summary = attempts.fit()
        cost = cost_of(attempts.instance_hours.by_kind)
        document = results.write_results(storage, recipe, config, summary, monitor.first_step_at, cost)
        _print_summary(recipe, document, summary["history"], console)
    return document


def _mark(storage: RunStorage) -> Mark:
    """Return the step of the newest checkpoint, by which the failure policy tells progress."""
    newest = newest_checkpoint(storage)
    return Mark(int(newest.rpartition("_")[2]) if newest else None)


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


def _epoch_line(metrics: Any, epochs: int, qualities: Sequence[Quality]) -> str:
    tested = "  ".join(f"test {each.name} {metrics[f'test_{each.name}']:.4f}" for each in qualities)
    return (
        f"epoch {metrics['epoch'] + 1}/{epochs}  train loss {metrics['train_loss']:.4f}  {tested}  "
        f"{metrics['train_seconds'] + metrics['test_seconds']:.1f} s"
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
        f"samples, {document['times']['total_seconds']:.0f} s in total{cost_line(document['cost'])}",
        highlight=False,
    )
    files = ", ".join([layout.RESULT, *document["files"].values()])
    console.print(f"results in {document['storage_path']}: {files}", highlight=False, soft_wrap=True)


def metric_names(qualities: Sequence[Quality]) -> dict[str, str]:
    """Return CloudWatch's names of what is published of a recipe's metrics, and the metrics' own."""
    tested = {f"Test{quality.name.title().replace('_', '')}": f"test_{quality.name}" for quality in qualities}
    return {"TrainLoss": "train_loss", **tested, SPEED: "samples_per_second"}
