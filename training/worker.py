"""What Ray Train runs on every worker: it wires the plain loop to Ray's device, checkpoints and reports."""

import logging
import platform
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch
from ray.train import Checkpoint
from ray.train.torch import get_device

from training import checkpoint, data
from training.config import TrainingConfig
from training.loop import Metrics, Replica, best
from training.progress import Reporter
from training.storage import BEST, METRICS, RunStorage


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
        print(epoch_line(metrics, config, replica.rank, device), flush=True)
        _save(replica, storage)
        reporter.epoch(metrics)
    return {"data": _describe(dataset), "hardware": _hardware(replica), "history": replica.history}


def epoch_line(metrics: Metrics, config: TrainingConfig, rank: int, device: torch.device) -> str:
    """The line that each worker prints after an epoch."""
    place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
    return (
        f"[Epoch {metrics['epoch']} | {place}: Process rank {rank} | Batchsize: {config.batch_size} | "
        f"Steps: {metrics['steps']} | Total epoch time: {metrics['train_seconds']:.3f}]"
    )


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
            if best(replica.history) is metrics:
                storage.upload(Path(folder), BEST)
            storage.write_lines(METRICS, replica.history)
        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(folder) if replica.rank == 0 else None,
            checkpoint_dir_name=checkpoint.name(metrics["epoch"]),
        )


def _describe(dataset: data.Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "train_samples": len(dataset.train),
        "test_samples": len(dataset.test),
        "classes": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
    }


def _hardware(replica: Replica) -> dict[str, Any]:
    """The device of rank 0 and its node; the ranks are alike, for Ray gives each the same resources."""
    cuda = replica.device.type == "cuda"
    return {
        "workers": replica.world_size,
        "device": torch.cuda.get_device_name(replica.device) if cuda else "CPU",
        "backend": ("nccl" if cuda else "gloo") if replica.world_size > 1 else None,
        "threads_per_worker": torch.get_num_threads(),
        "node_cpus": psutil.cpu_count(),
        "node_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "machine": platform.machine(),
        "platform": platform.platform(),
    }
