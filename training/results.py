"""What a finished run leaves: result.json, the curves as a picture, the weights, and the table on the screen."""

import io
import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from matplotlib.figure import Figure
from pyarrow import fs
from rich.table import Table

import training
from training.config import TrainingConfig
from training.loop import Metrics, best
from training.storage import BEST, CURVES, METRICS, RESULT, WEIGHTS, RunStorage

PACKAGES = ("torch", "torchvision", "ray", "numpy", "pyarrow")


def write(
    storage: RunStorage, config: TrainingConfig, outcome: dict[str, Any], checkpoint: str, started: datetime
) -> dict[str, Any]:
    """Write the results of a run into its folder; `result.json` comes last, for it says that the rest is there.

    Args:
        storage: The run's folder.
        config: Its settings, with the data set, workers and device that were used.
        outcome: What the workers returned: `data`, `hardware`, `history`.
        checkpoint: The folder of the last checkpoint, whose weights are the result.
        started: When this command started; earlier parts of a resumed run are in `training_seconds` only.

    Returns:
        The document written to `result.json`.
    """
    history: list[Metrics] = outcome["history"]
    fs.copy_files(
        f"{checkpoint}/{WEIGHTS}",
        storage.path(WEIGHTS),
        source_filesystem=storage.filesystem,
        destination_filesystem=storage.filesystem,
    )
    storage.write(CURVES, curves(history))
    document = {
        "run_name": config.run_name,
        "storage_path": storage.uri,
        "metrics": history[-1],
        "best": best(history),
        "data": outcome["data"],
        "hardware": outcome["hardware"],
        "versions": versions(),
        "times": _times(started, history),
        "config": config.to_dict(),
        "files": {"weights": WEIGHTS, "metrics": METRICS, "curves": CURVES, "best_checkpoint": BEST},
    }
    storage.write_json(RESULT, document)
    return document


def curves(history: list[Metrics]) -> bytes:
    """A PNG of loss and accuracy by epoch, in training and on the test set."""
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
    shown = Table(title=f"Training result: {document['run_name']}")
    for heading in ("epoch", "train loss", "train acc.", "test loss", "test acc.", "images/s", "seconds"):
        shown.add_column(heading, justify="right")
    for each in history:
        best = each["epoch"] == document["best"]["epoch"]
        shown.add_row(
            str(each["epoch"] + 1),
            *(f"{each[name]:.4f}" for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")),
            f"{each['samples_per_second']:,.0f}",
            f"{each['train_seconds'] + each['test_seconds']:.1f}",
            style="bold" if best else "",
        )
    return shown


def versions() -> dict[str, str | None]:
    """What the run ran on, by version."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {
        "training": training.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **packages,
    }


def _times(started: datetime, history: list[Metrics]) -> dict[str, Any]:
    finished = datetime.now(UTC)
    return {
        "started": started.isoformat(timespec="seconds"),
        "finished": finished.isoformat(timespec="seconds"),
        "total_seconds": (finished - started).total_seconds(),
        "training_seconds": sum(each["train_seconds"] for each in history),
        "test_seconds": sum(each["test_seconds"] for each in history),
    }
