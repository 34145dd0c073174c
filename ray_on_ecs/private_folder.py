"""Folders that only this user can open: for temporary files, which all processes of a node share, and at home."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ray_on_ecs.errors import UsageError


def temporary() -> Path:
    """Return this user's folder for temporary files, equal in all processes of a node.

    UsageError if it can't be created, or others can open it: they might have put programs there.
    """
    folder = Path(tempfile.gettempdir()) / f"ray-on-ecs-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as cause:
        raise UsageError(f"TMPDIR: {folder} can't be created ({cause.strerror}); set it to another folder") from cause
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"TMPDIR: {folder} is not a folder that only you can open; delete it, or set TMPDIR to another folder"
        )
    return folder


def node_folder(kind: str, key: str) -> Path:
    """Return the path of a folder for temporary files of a kind, such as `inputs`, named by the hash of the key."""
    return temporary() / kind / hashlib.sha256(key.encode()).hexdigest()[:16]


def new_short(prefix: str) -> str:
    """Return the path of a new temporary folder, short enough for the paths of sockets below it."""
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")  # nosec B108 # a random name with mode 0700


def at_home() -> Path:
    """Return the folder `~/.ray-on-ecs`; OSError if it can't be made, RuntimeError without a home directory."""
    folder = Path.home() / ".ray-on-ecs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # of another user, in a container with a mounted home
        folder.chmod(0o700)
    return folder
