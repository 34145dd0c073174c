"""What Ray Train runs on every worker: it wires the plain loop to Ray's device, checkpoints and reports."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint
from ray.train.torch import get_device

from training import checkpoint, data, results
from training.config import TrainingConfig
from training.loop import Replica
from training.progress import Reporter
from training.storage import RunStorage


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train from the latest checkpoint, or from the start, to the last epoch.

    Args:
        settings: `config` (TrainingConfig), `storage` (RunStorage) and `board` (the driver's progress board).

    Returns:
        On rank 0, what the run was made of: `data`, `hardware` and `history`.
    """
    logging.getLogger().setLevel(logging.WARNING)  # Ray would log every report of every rank
    config: TrainingConfig = settings["config"]
    storage: RunStorage = settings["storage"]
    device = get_device()
    dataset = data.load(config.dataset, config)
    replica = Replica(config, dataset, device)
    _resume(replica)
    reporter = Reporter(settings["board"], replica.rank, replica.epoch)
    while replica.epoch < config.epochs:
        metrics = replica.run_epoch(on_step=reporter.step)
        print(results.epoch_line(metrics, config, replica.rank, device), flush=True)
        _save(replica, storage)
        reporter.epoch(metrics)
    return results.outcome(replica, dataset)


def _resume(replica: Replica) -> None:
    if latest := ray.train.get_checkpoint():
        with latest.as_directory() as folder:
            checkpoint.load(replica, Path(folder))


def _save(replica: Replica, storage: RunStorage) -> None:
    """Report the epoch with its checkpoint; every rank must, though rank 0 alone brings files."""
    metrics = replica.history[-1]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(replica, Path(folder))
        if replica.rank == 0:
            results.note(storage, replica.history, Path(folder))
        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(folder) if replica.rank == 0 else None,
            checkpoint_dir_name=checkpoint.name(metrics["epoch"]),
        )
