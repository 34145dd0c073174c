"""Caches on a node's disk: each made once for all processes of the node, the least recently used deleted first.

Beside a cache `C` lie `C.lock`, held while it is made or deleted; `C.complete`, once it is made; and `C.used`, on which
each process that uses it has a shared lock until it ends. The time of `C.used` is that of the last use.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from ray_on_ecs.node_folder import node_folder

MAX_AGE_SECONDS = 30 * 24 * 3600.0
# The descriptors whose locks keep the caches of this process on the disk.
_held: dict[Path, int] = {}


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return a complete folder, which stays as long as this process.

    Args:
        kind: What it is for, such as `inputs`.
        key: What tells it from others of its kind.
        make: Fills it, given its path, where nothing is; it is called unless another process has made the folder.
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
    """Keep a cache from being deleted until this process ends; its caller has the lock under which it is made."""
    import fcntl  # Windows, from which clients may run, has none

    if folder not in _held:
        _held[folder] = os.open(_beside(folder, "used"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
    os.utime(_held[folder])


def make_room(needed: int) -> None:
    """Delete caches that no process uses: those too old, and then the least recently used until there is room.

    Args:
        needed: The bytes that the disk should have free.
    """
    root = Path(tempfile.gettempdir())
    oldest = time.time() - MAX_AGE_SECONDS
    for last_use, used in sorted((_last_use(each), each) for each in root.glob("training-*/*.used")):
        folder = used.with_suffix("")
        if folder not in _held and (last_use < oldest or shutil.disk_usage(root).free < needed):
            _delete(folder)


def _last_use(used: Path) -> float:
    try:
        return used.stat().st_mtime
    except FileNotFoundError:  # another process has just deleted it
        return 0.0


def _delete(folder: Path) -> None:
    """Delete a cache unless it is being made or used, or is another user's."""
    import fcntl

    used = _beside(folder, "used")
    with suppress(OSError), FileLock(_beside(folder, "lock"), timeout=0), used.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _beside(folder, "complete").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_beside(folder, "part"), ignore_errors=True)  # of a process that was killed
        used.unlink()


def _beside(folder: Path, name: str) -> Path:
    return Path(f"{folder}.{name}")
