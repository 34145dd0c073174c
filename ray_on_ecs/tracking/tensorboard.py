"""TensorBoard event file of a run's metrics, for `tensorboard --logdir FOLDER`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path


def write_events(values: Iterable[tuple[str, float, int, str]]) -> bytes:
    """Return the event file of scalars, as tuples of tag, value, step and time (ISO 8601)."""
    from tensorboardX import SummaryWriter  # slow to import

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for tag, value, step, time in values:
                writer.add_scalar(tag, value, step, datetime.fromisoformat(time).timestamp())
        [file] = Path(folder).iterdir()
        return file.read_bytes()
