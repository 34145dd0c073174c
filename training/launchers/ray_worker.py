"""What Ray Train runs on every worker: it connects a recipe's trainer to Ray's device, preemptions and run state."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import ray
import ray.train
from ray.train.torch import get_device

from training.checkpoint.manager import CheckpointManager, Preempted, Preemption
from training.engine.config import TrainingConfig
from training.engine.fit import fit
from training.engine.recipe import Recipe
from training.engine.trainer import Trainer
from training.errors import StorageError, UsageError
from training.monitoring import watchdog
from training.monitoring.reporter import Reporter
from training.run import layout, results
from training.run.results import RunSummary
from training.run.storage import RunStorage

# Assumed when AWS reports no deadline.
DEFAULT_PREEMPTION_SECONDS = 60.0
# Stop saving this long before the deadline.
MARGIN_SECONDS = 5.0
# Result key: the ranks whose nodes are being reclaimed.
PREEMPTED = "preempted"


class Settings(TypedDict):
    """What the driver passes to `train`."""

    recipe: Recipe
    config: TrainingConfig
    storage: RunStorage
    run_state: Any


def train(settings: Settings) -> RunSummary | dict[str, Any]:
    """Train from the latest checkpoint, or from the start, to the last epoch.

    Returns:
        On rank 0 the summary of the run (`run.results.run_summary`), or `{"preempted": ranks}` if nodes are being
        reclaimed. Ray Train cannot restart the worker group before those nodes are gone, so the driver calls `fit()`
        again.
    """
    run_state = settings["run_state"]
    if ray.get(run_state.read.remote()).fatal_error:
        return {}
    try:
        return _train(settings["recipe"], settings["config"], settings["storage"], run_state)
    except Preempted as stop:
        return {PREEMPTED: stop.ranks}
    except (StorageError, UsageError) as cause:
        ray.get(run_state.set_fatal_error.remote(cause))
        raise


def _train(recipe: Recipe, config: TrainingConfig, storage: RunStorage, run_state: Any) -> RunSummary:
    logging.getLogger().setLevel(logging.WARNING)
    rank = ray.train.get_context().get_world_rank()
    reporter = WorkerReporter(run_state, rank, watchdog.enable_stack_dumps())
    _check_shared(storage)
    trainer = recipe.build(config, get_device())
    reporter.describe(config, trainer)
    with CheckpointManager(
        trainer,
        storage,
        config,
        score=recipe.score,
        preemption=preemption,
        heartbeat=reporter.heartbeat,
        on_epoch_saved=lambda history: results.write_metrics(storage, recipe, history),
    ) as checkpoints:
        fit(trainer, checkpoints, config.epochs, reporter)
    return results.run_summary(trainer, checkpoints.summary)


class WorkerReporter(Reporter):
    """Also prints each worker's line after an epoch."""

    def describe(self, config: TrainingConfig, trainer: Trainer) -> None:
        """Take what the lines say of this worker."""
        self._config, self._trainer = config, trainer

    def trained(self, metrics: Any) -> None:
        """Print this worker's line."""
        print(results.worker_epoch_line(metrics, self._config, self._trainer.rank, self._trainer.device), flush=True)


def preemption() -> Preemption | None:
    """Return what Ray Train knows of nodes that are being reclaimed: a spot instance, a draining node, a deployment.

    It is the same on all ranks, which must call it at the same step.
    """
    if (info := ray.train.get_preemption_info()) is None:
        return None
    ranks: Sequence[int] = info.preempted_ranks
    deadline = info.deadline_ms / 1000 if info.deadline_ms else time.time() + DEFAULT_PREEMPTION_SECONDS
    return Preemption(list(ranks), deadline - MARGIN_SECONDS)


def _check_shared(storage: RunStorage) -> None:
    """Refuse a folder that isn't the driver's, who has written the settings there: every checkpoint would be lost."""
    if not storage.exists(layout.SETTINGS):
        raise UsageError(
            f"--storage-path: {storage.uri} is not the same folder on every node; give s3://bucket/prefix, or a folder "
            "that all nodes share"
        )
