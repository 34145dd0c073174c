"""The tags of a recipe's TensorBoard event file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_on_ecs.tracking.tensorboard import write_events
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
    return {**qualities, **SCALARS, **recipe.scalars}


def event_file(history: Sequence[Any], recipe: Recipe) -> bytes:
    """Return the event file of these epochs' metrics, by epoch, at the times when they finished."""
    tags = scalars(recipe)
    return write_events(
        (tag, metrics[name], metrics["epoch"], metrics["finished"])
        for metrics in history
        for tag, name in tags.items()
        if metrics[name] is not None
    )
