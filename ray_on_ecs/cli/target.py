"""Folders into which a command writes: they are checked before it does anything."""

from __future__ import annotations

import os
from pathlib import Path

from ray_on_ecs.errors import UsageError
from ray_on_ecs.names import is_inside
from ray_on_ecs.storage.disk import nearest
from ray_on_ecs.storage.run_storage import RunStorage


def check_folder(target: Path, flag: str = "DIR") -> None:
    """Raise UsageError unless a folder is there, or can be made."""
    there = nearest(target.expanduser().absolute())
    if not there.is_dir():
        raise UsageError(f"{flag}: {there} is not a folder; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{flag}: {there} can't be written; give another folder")


def check_target(storage: RunStorage, target: Path, flag: str = "DIR") -> None:
    """Raise UsageError unless a run can be copied to a folder, which is not in the run's own."""
    check_folder(target, flag)
    if storage.is_local and is_inside(target.expanduser(), Path(storage.path())):
        raise UsageError(f"{flag}: {target} belongs to the run's own folder, {storage.uri}; give another folder")
