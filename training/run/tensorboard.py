"""A run's metrics as a TensorBoard event file: `tensorboard --logdir FOLDER` draws them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from training.engine.recipe import Recipe

# Tags and the metrics that every recipe has beside its qualities.
SCALARS = {
    "learning_rate": "learning_rate",
    "speed/samples_per_second": "samples_per_second",
    "speed/step_seconds_median": "step_seconds_median",
    "speed/step_seconds_p95": "step_seconds_p95",
    "waiting/data": "data_wait_fraction",
    "waiting/communication": "exposed_comm_fraction",
    "gpu_memory_bytes": "gpu_memory_bytes",
}


def scalars(recipe: Recipe) -> dict[str, str]:
    """Return the tags of a recipe's event file and the metric that each shows."""
    qualities = {
        f"{each.name}/{part}": f"{part}_{each.name}" for each in recipe.qualities for part in ("train", "test")
    }
    return {**qualities, **SCALARS}


def event_file(history: Sequence[Any], recipe: Recipe) -> bytes:
    """Return the event file of these epochs' metrics, by epoch, at the times when they finished."""
    from tensorboardX import SummaryWriter  # takes a while: not before the first epoch is over

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for metrics in history:
                finished = datetime.fromisoformat(metrics["finished"]).timestamp()
                for tag, name in scalars(recipe).items():
                    if metrics[name] is not None:
                        writer.add_scalar(tag, metrics[name], metrics["epoch"], finished)
        [file] = Path(folder).iterdir()
        return file.read_bytes()
