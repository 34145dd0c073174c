"""Caches on a node's disk, shared by the node's processes and deleted in LRU order.

A cache `C` has three files: `C.lock`, held while it is created or deleted; `C.complete`, once it is created; and
`C.used`, on which each process that uses it holds a shared lock until it ends, and whose time is the last use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path

from filelock import FileLock

from ray_on_ecs.private_folder import node_folder, temporary

MAX_AGE_SECONDS = 30 * 24 * 3600.0  # a data set may be trained on again
# File descriptors of `C.used`, whose locks protect this process's caches from deletion.
_held: dict[Path, int] = {}


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the complete folder of a kind with this key, which is not deleted before this process ends.

    `make` creates it at a path, unless another process has created it.
    """
    folder = node_folder(kind, key)
    complete = _beside(folder, "complete")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_beside(folder, "lock")):
        hold(folder)
        if not (complete.exists() and folder.exists()):
            complete.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            complete.touch()
    return folder


def hold(folder: Path) -> None:
    """Protect a cache from deletion until this process ends; the caller holds its lock."""
    if folder not in _held:
        _held[folder] = os.open(_beside(folder, "used"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
    os.utime(_held[folder])


def make_room(needed: int) -> None:
    """Delete unused caches: old ones, and then the least recently used until the disk has the needed bytes free."""
    root = temporary()
    oldest = time.time() - MAX_AGE_SECONDS
    caches = []
    # Of the module glob, which passes over folders that another process has just deleted; Path.glob fails at them.
    for name in glob("*/*.used", root_dir=root):
        with suppress(FileNotFoundError):  # another process has just deleted it
            caches.append(((root / name).stat().st_mtime, (root / name).with_suffix("")))
    for last_use, folder in sorted(caches):
        if folder not in _held and (last_use < oldest or shutil.disk_usage(root).free < needed):
            _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a cache unless it is being created or used, or belongs to another user."""
    used = _beside(folder, "used")
    with suppress(OSError), FileLock(_beside(folder, "lock"), timeout=0), used.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _beside(folder, "complete").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_beside(folder, "part"), ignore_errors=True)  # from a process that was killed
        used.unlink()


def _beside(folder: Path, name: str) -> Path:
    return Path(f"{folder}.{name}")
