"""What Ray Train runs on every worker: it connects a recipe's trainer to Ray's device, preemptions and run state."""

from __future__ import annotations

import logging
from typing import Any, TypedDict

import ray
import ray.train
from ray.train.torch import TorchConfig, get_device
from ray.train.torch.config import _TorchBackend

from ray_on_ecs.checkpoint.manager import CheckpointManager, Preempted
from ray_on_ecs.run import worker_dump
from ray_on_ecs.run.nccl_interface import use_route_to_head
from ray_on_ecs.run.preemption import PREEMPTED, preemption
from ray_on_ecs.tracking.run_actor import RunClient
from ray_on_ecs.tracking.storage import RunStorage
from training import results
from training.engine.config import TrainingConfig
from training.engine.feed import Feed, thread_feed
from training.engine.fit import fit
from training.engine.recipe import Recipe
from training.engine.watchdog import Watchdog
from training.preprocessing import helper_feed
from training.reporter import Reporter
from training.results import RunSummary

# Loading the data, building the model and writing a recipe's own files give no heartbeats: they may take so many times
# the hang timeout.
LOADING_PATIENCE = 6.0


class RoutedTorchBackend(_TorchBackend):
    """Points NCCL and Gloo at the interface that leads to the head before there is a process group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set the variables on every worker, and make the process group."""
        worker_group.execute(use_route_to_head)
        super().on_start(worker_group, backend_config)


class RoutedTorchConfig(TorchConfig):
    """The process group of the workers."""

    @property
    def backend_cls(self) -> type[RoutedTorchBackend]:
        """The backend above."""
        return RoutedTorchBackend


class Settings(TypedDict):
    """What the driver passes to `train`."""

    recipe: Recipe
    config: TrainingConfig
    storage: RunStorage
    run_state: RunClient
    uses_helpers: bool
    may_start_helpers: bool
    attempt: int


def train(settings: Settings) -> RunSummary | dict[str, Any]:
    """Train from the latest checkpoint, or from the start, to the last epoch.

    Returns:
        On rank 0 the summary of the run, or `{"preempted": ranks}` if nodes are being reclaimed. Ray Train cannot
        restart the worker group before those nodes are gone, so the driver calls `fit()` again.
    """
    logging.getLogger().setLevel(logging.WARNING)
    rank = ray.train.get_context().get_world_rank()
    uri = settings["storage"].uri
    timeout = settings["config"].hang_timeout
    with Watchdog(timeout, worker_dump.worker_file(uri, rank), worker_dump.about_worker(rank)) as watchdog:
        try:
            return _train(**settings, watchdog=watchdog)
        except Preempted as stop:
            return {PREEMPTED: stop.ranks}


def _train(
    recipe: Recipe,
    config: TrainingConfig,
    storage: RunStorage,
    run_state: RunClient,
    uses_helpers: bool,
    may_start_helpers: bool,
    attempt: int,
    watchdog: Watchdog,
) -> RunSummary:
    storage.check_shared()
    with watchdog.patience(LOADING_PATIENCE):
        trainer = recipe.build(config, get_device(), _feed(config, uses_helpers, may_start_helpers))
    reporter = Reporter(run_state, watchdog, config, trainer)
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
    with watchdog.patience(LOADING_PATIENCE):
        files = results.write_files(storage, recipe, trainer)
    return results.run_summary(trainer, checkpoints.summary, files)


def _feed(config: TrainingConfig, uses_helpers: bool, may_start_helpers: bool) -> Feed:
    """Return what prepares data: the stack's helpers or, while there are none, threads on this worker's CPUs."""
    cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    threads = thread_feed(config.data_workers or max(1, cpus))
    if not uses_helpers:  # the workers have their CPUs, for which a pipeline would wait for ever
        return threads
    workers = ray.train.get_context().get_world_size()
    return helper_feed(threads, config.data_workers, workers, may_start_helpers)
