"""A run's metrics as a TensorBoard event file: `tensorboard --logdir FOLDER` draws them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path


def write_events(values: Iterable[tuple[str, float, int, str]]) -> bytes:
    """Return the event file of scalars, each one with its tag, step and time (ISO 8601)."""
    from tensorboardX import SummaryWriter  # takes a while: not before there is something to write

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for tag, value, step, time in values:
                writer.add_scalar(tag, value, step, datetime.fromisoformat(time).timestamp())
        [file] = Path(folder).iterdir()
        return file.read_bytes()
