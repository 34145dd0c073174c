"""What a run leaves: metrics and events after each epoch; at its end result.json, curves, weights and a table."""

import io
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import psutil
import torch
from rich.table import Table

import training
from training.config import TrainingConfig
from training.data import Dataset
from training.events import EVENTS, event_file
from training.loop import Metrics, Replica
from training.storage import BEST, CURVES, METRICS, RESULT, WEIGHTS, RunStorage

PACKAGES = ("torch", "torchvision", "ray", "numpy", "pyarrow")


def note(storage: RunStorage, history: list[Metrics]) -> None:
    """Leave the metrics of the epochs so far."""
    storage.write_lines(METRICS, history)
    storage.write(EVENTS, event_file(history))


def epoch_line(metrics: Metrics, config: TrainingConfig, rank: int, device: torch.device) -> str:
    """The line that each worker prints after an epoch."""
    place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
    return (
        f"[Epoch {metrics['epoch']} | {place}: Process rank {rank} | Batchsize: {config.batch_size} | "
        f"Steps: {metrics['steps']} | Total epoch time: {metrics['train_seconds']:.3f}]"
    )


def outcome(replica: Replica, dataset: Dataset, checkpoints: dict[str, Any]) -> dict[str, Any]:
    """What `write` needs to know of a run: `data`, `hardware`, `history` and `checkpoints`, as the keeper has them.

    The hardware is the device of rank 0 and its node; the ranks are alike, for Ray gives each the same resources.
    """
    cuda = replica.device.type == "cuda"
    return {
        "data": {
            "name": dataset.name,
            "train_samples": len(dataset.train),
            "test_samples": len(dataset.test),
            "classes": dataset.classes,
            "mean": dataset.mean,
            "std": dataset.std,
        },
        "hardware": {
            "workers": replica.world_size,
            "device": torch.cuda.get_device_name(replica.device) if cuda else "CPU",
            "backend": ("nccl" if cuda else "gloo") if replica.world_size > 1 else None,
            "threads_per_worker": torch.get_num_threads(),
            "node_cpus": psutil.cpu_count(),
            "node_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "machine": platform.machine(),
            "platform": platform.platform(),
        },
        "history": replica.history,
        "checkpoints": checkpoints,
    }


def write(
    storage: RunStorage, config: TrainingConfig, outcome: dict[str, Any], first_step: float | None
) -> dict[str, Any]:
    """Write the results of a run into its folder; `result.json` comes last, for it says that the rest is there.

    Args:
        storage: The run's folder.
        config: Its settings, with the data set, workers and device that were used.
        outcome: What rank 0 returned: `data`, `hardware`, `history`, `checkpoints`. The weights are those of the last
            checkpoint, and of the best.
        first_step: When the first step was done, in seconds of the epoch. Times are of this command; earlier parts of a
            resumed run are in `training_seconds` only.

    Returns:
        The document written to `result.json`.
    """
    history: list[Metrics] = outcome["history"]
    checkpoints = outcome["checkpoints"]
    note(storage, history)  # again: a call may have been lost, or the run may have been cut, after the last epoch
    storage.copy(f"{checkpoints['best']}/{WEIGHTS}", BEST)
    storage.copy(f"{checkpoints['last']}/{WEIGHTS}", WEIGHTS)
    storage.write(CURVES, curves(history))
    document = {
        "run_name": config.run_name,
        "storage_path": storage.uri,
        "metrics": history[-1],
        "best": history[checkpoints["best_epoch"]],
        "checkpoints": checkpoints,
        "data": outcome["data"],
        "hardware": outcome["hardware"],
        "versions": versions(),
        "times": _times(first_step, history),
        "config": config.to_dict(),
        "files": {"weights": WEIGHTS, "metrics": METRICS, "curves": CURVES, "events": EVENTS, "best_weights": BEST},
    }
    storage.write_json(RESULT, document)
    return document


def curves(history: list[Metrics]) -> bytes:
    """A PNG of loss and accuracy by epoch, in training and on the test set."""
    from matplotlib.figure import Figure  # takes a second: not before the training

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    epochs = [each["epoch"] + 1 for each in history]
    for axes, name, unit in zip(figure.subplots(1, 2), ("loss", "accuracy"), ("cross-entropy", "share"), strict=True):
        for part in ("train", "test"):
            axes.plot(epochs, [each[f"{part}_{name}"] for each in history], marker="o", markersize=3, label=part)
        axes.set(title=name, xlabel="epoch", ylabel=unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def table(document: dict[str, Any], history: list[Metrics]) -> Table:
    """The table at the end: a row for each epoch, the best in bold."""
    shown = Table(title=f"Training result: {document['run_name']}", box=None, padding=(0, 1, 0, 0))
    headings = ["epoch", "train\nloss", "train\nacc.", "test\nloss", "test\nacc.", "s"]
    watched = ["images/s", "step\nms", "95 %\nms", "data\nwait", "net\nwait"]
    on_gpu = history[-1]["gpu_memory_bytes"] is not None
    for heading in [*headings, *watched, *["GPU\nGiB"] * on_gpu]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in history:
        is_best = each["epoch"] == document["best"]["epoch"]
        shown.add_row(
            str(each["epoch"] + 1),
            *(f"{each[name]:.4f}" for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")),
            f"{each['train_seconds'] + each['test_seconds']:.1f}",
            f"{each['samples_per_second']:,.0f}",
            *(_milliseconds(each[name]) for name in ("step_seconds_median", "step_seconds_p95")),
            *(f"{each[name]:.1%}" for name in ("data_wait_share", "network_wait_share")),
            *[f"{(each['gpu_memory_bytes'] or 0) / 2**30:.2f}"] * on_gpu,
            style="bold" if is_best else "",
        )
    return shown


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def versions() -> dict[str, str | None]:
    """What the run ran on, by version."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {
        "training": training.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **packages,
    }


def _times(first_step: float | None, history: list[Metrics]) -> dict[str, Any]:
    """Times of this command, from the start of its process."""
    started, finished = psutil.Process().create_time(), time.time()
    return {
        "started": _iso(started),
        "first_step": _iso(first_step) if first_step else None,
        "finished": _iso(finished),
        "total_seconds": finished - started,
        "to_first_step_seconds": first_step - started if first_step else None,
        "training_seconds": sum(each["train_seconds"] for each in history),
        "test_seconds": sum(each["test_seconds"] for each in history),
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
