"""What a run leaves: metrics and events after each epoch; at its end result.json, plots, weights and a table."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import psutil
from rich.table import Table

from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.cost import Cost
from ray_on_ecs.tracking.results import png, run_times, versions
from ray_on_ecs.tracking.storage import RunStorage
from training.tensorboard import event_file

if TYPE_CHECKING:  # torch and matplotlib take a second each to import: not before they are used
    import torch

    from training.engine.config import TrainingConfig
    from training.engine.recipe import Recipe
    from training.engine.trainer import Trainer


class CheckpointSummary(TypedDict):
    """What became of the checkpoints.

    Attributes:
        last: Name of the last checkpoint.
        best: Name of the one with the highest score.
        best_epoch: The epoch that it ended, from 0.
        blocked_seconds: How long training paused for checkpoints.
    """

    last: str
    best: str
    best_epoch: int
    blocked_seconds: float


class RunSummary(TypedDict):
    """What rank 0 knows of a finished run.

    Attributes:
        data: The data set, as the trainer describes it.
        hardware: Rank 0's device and node; Ray gives every rank the same resources.
        history: The metrics of all epochs.
        files: The recipe's own files and folders in the run's folder, by their names without a suffix.
        checkpoints: What became of the checkpoints; empty on other ranks.
    """

    data: dict[str, Any]
    hardware: dict[str, Any]
    history: list[Any]
    files: dict[str, str]
    checkpoints: CheckpointSummary


def write_metrics(storage: RunStorage, recipe: Recipe, history: Sequence[Any]) -> None:
    """Write the metrics of the epochs so far: as JSON lines and as a TensorBoard event file.

    Raises:
        OSError: The files could not be written.
    """
    storage.write_lines(layout.METRICS, history)
    storage.write(layout.EVENTS, event_file(history, recipe))


def worker_epoch_line(metrics: Any, config: TrainingConfig, rank: int, device: torch.device) -> str:
    """Return the line that each worker prints after an epoch."""
    place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
    return (
        f"[Epoch {metrics['epoch']} | {place}: Process rank {rank} | Batchsize: {config.batch_size} | "
        f"Steps: {metrics['steps']} | Total epoch time: {metrics['train_seconds']:.3f}]"
    )


def write_files(storage: RunStorage, recipe: Recipe, trainer: Trainer) -> dict[str, str]:
    """Write the files that only this recipe leaves at the end of a run; every rank must call it.

    Returns:
        The files and folders, by their names without a suffix.

    Raises:
        OSError: A file could not be written.
    """
    written: dict[str, str] = {}
    for name, content in recipe.files(trainer):
        top = name.partition("/")[0]
        written[top.partition(".")[0]] = top
        if trainer.rank == 0:
            storage.write(name, content)
    return written


def run_summary(trainer: Trainer, checkpoints: Any, files: Mapping[str, str] | None = None) -> RunSummary:
    """Collect what `write_results` needs from the worker."""
    import torch

    cuda = trainer.device.type == "cuda"
    return {
        "data": dict(trainer.data_summary),
        "hardware": {
            "workers": trainer.world_size,
            "device": torch.cuda.get_device_name(trainer.device) if cuda else "CPU",
            "backend": ("nccl" if cuda else "gloo") if trainer.world_size > 1 else None,
            "threads_per_worker": torch.get_num_threads(),
            "node_cpus": psutil.cpu_count(),
            "node_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "machine": platform.machine(),
            "platform": platform.platform(),
        },
        "history": trainer.history,
        "files": dict(files or {}),
        "checkpoints": checkpoints,
    }


def write_results(
    storage: RunStorage,
    recipe: Recipe,
    config: TrainingConfig,
    summary: RunSummary,
    first_step: float | None,
    cost: Cost | None = None,
) -> dict[str, Any]:
    """Write the results of a finished run into its folder.

    Args:
        storage: The run's folder.
        recipe: What was trained.
        config: The run's settings.
        summary: What rank 0 returned.
        first_step: When this command's first step was done (Unix time), or None if it made none. The times are those of
            this command; `training_seconds` and `test_seconds` also cover earlier parts of a resumed run.
        cost: What this command's instances have cost, if that is known.

    Returns:
        The document written to `result.json`.

    Raises:
        OSError: A file could not be written.
    """
    history = summary["history"]
    checkpoints = summary["checkpoints"]
    write_metrics(storage, recipe, history)  # again: the last write may have failed, or the run was interrupted
    storage.write(layout.CURVES, plot_curves(history, recipe))
    document = {
        "run_name": config.run_name,
        "storage_path": storage.uri,
        "metrics": history[-1],
        "best": history[checkpoints["best_epoch"]],
        "score": recipe.score,
        "checkpoints": checkpoints,
        "data": summary["data"],
        "hardware": summary["hardware"],
        "versions": versions(),
        "times": {
            **run_times("first_step", first_step),
            "training_seconds": sum(each["train_seconds"] for each in history),
            "test_seconds": sum(each["test_seconds"] for each in history),
        },
        "cost": cost,
        "config": config.to_dict(),
        "files": {
            "weights": layout.WEIGHTS,
            "metrics": layout.METRICS,
            "curves": layout.CURVES,
            "events": layout.EVENTS,
            "best_weights": layout.BEST_WEIGHTS,
            "report": layout.REPORT,
            **summary["files"],
        },
    }
    storage.write_json(layout.RESULT, document)
    return document


def plot_curves(history: Sequence[Any], recipe: Recipe) -> bytes:
    """Return a PNG of each of the recipe's qualities by epoch, on the training and the test set."""
    from matplotlib.figure import Figure  # takes a second: not before the training

    figure = Figure(figsize=(4.5 * len(recipe.qualities), 3.6), layout="constrained")
    epochs = [each["epoch"] + 1 for each in history]
    subplots = figure.subplots(1, len(recipe.qualities), squeeze=False)[0]
    for axes, quality in zip(subplots, recipe.qualities, strict=True):
        for part in ("train", "test"):
            values = [each[f"{part}_{quality.name}"] for each in history]
            axes.plot(epochs, values, marker="o", markersize=3, label=part)
        axes.set(title=quality.name, xlabel="epoch", ylabel=quality.unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    return png(figure)


def table(document: dict[str, Any], recipe: Recipe, history: Sequence[Any]) -> Table:
    """Return the table at the end of a run: a row for each epoch, the best in bold."""
    shown = Table(title=f"Training result: {document['run_name']}", box=None, padding=(0, 1, 0, 0))
    qualities = [f"{part}_{quality.name}" for part in ("train", "test") for quality in recipe.qualities]
    headings = ["epoch", *(name.replace("_", "\n") for name in qualities), "s"]
    headings += ["samples/s", "step\nms", "95 %\nms", "data\nwait", "comm.\nwait"]
    on_gpu = history[-1]["gpu_memory_bytes"] is not None
    if on_gpu:
        headings.append("GPU\nGiB")
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in history:
        cells = [str(each["epoch"] + 1), *(f"{each[name]:.4f}" for name in qualities)]
        cells.append(f"{each['train_seconds'] + each['test_seconds']:.1f}")
        cells.append(f"{each['samples_per_second']:,.0f}")
        cells += [_milliseconds(each[name]) for name in ("step_seconds_median", "step_seconds_p95")]
        waits = (each[name] for name in ("data_wait_fraction", "exposed_comm_fraction"))
        cells += ["" if wait is None else f"{wait:.1%}" for wait in waits]
        if on_gpu:
            cells.append(f"{(each['gpu_memory_bytes'] or 0) / 2**30:.2f}")
        shown.add_row(*cells, style="bold" if each["epoch"] == document["best"]["epoch"] else "")
    return shown


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"
