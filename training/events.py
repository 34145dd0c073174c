"""A run's metrics as a TensorBoard event file: `tensorboard --logdir FOLDER` draws them."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

EVENTS = "tensorboard/events.out.tfevents.training"

SCALARS = {
    "loss/train": "train_loss",
    "loss/test": "test_loss",
    "accuracy/train": "train_accuracy",
    "accuracy/test": "test_accuracy",
    "learning_rate": "learning_rate",
    "speed/samples_per_second": "samples_per_second",
    "speed/step_seconds_median": "step_seconds_median",
    "speed/step_seconds_p95": "step_seconds_p95",
    "waiting/data": "data_wait_share",
    "waiting/network": "network_wait_share",
    "gpu_memory_bytes": "gpu_memory_bytes",
}


def event_file(history: list[dict[str, Any]]) -> bytes:
    """The event file of these epochs' metrics, by epoch, at the times when they were finished."""
    from tensorboardX import SummaryWriter  # takes a while: not before the first epoch is over

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for metrics in history:
                finished = datetime.fromisoformat(metrics["finished"]).timestamp()
                for tag, name in SCALARS.items():
                    if metrics[name] is not None:
                        writer.add_scalar(tag, metrics[name], metrics["epoch"], finished)
        [file] = Path(folder).iterdir()
        return file.read_bytes()
