"""Folders that only this user can open, for temporary files of a node's processes and at home, and their locks."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ray_on_ecs.errors import ResourceError, UsageError, one_line

if TYPE_CHECKING:
    from filelock import BaseFileLock

# How long another command may hold a lock until this one says that it waits.
QUIET_SECONDS = 2.0


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
    if not Path.home().is_absolute():  # each process would have another one
        raise RuntimeError(f"HOME is {str(Path.home())!r}, which is not an absolute path")
    folder = Path.home() / ".ray-on-ecs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # of another user, in a container with a mounted home
        folder.chmod(0o700)
    return folder


def machine() -> str:
    """Return the name of this machine or container among those that may share a home directory."""
    if sys.platform != "linux":  # a Mac shares it with no other machine
        return sys.platform
    with suppress(OSError):  # a host name may change with the network
        if identity := Path("/etc/machine-id").read_text().strip():
            return identity
    return socket.gethostname()


def place() -> str:
    """Return what distinguishes the processes that this one can see: a boot of a machine, and a container on it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        return f"{machine()} {subprocess.run(command, capture_output=True, text=True).stdout.strip()}"
    boot, processes = machine(), ""
    with suppress(OSError):  # a sandbox may hide them
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return f"{boot} {processes}"


@contextmanager
def held(lock: BaseFileLock, what: str, seconds: float = -1) -> Generator[None]:
    """Hold a lock until the block ends; after two seconds print a line about the wait.

    `what` is what another command does that holds it; empty to wait without a line. Timeout once that has held it for
    so many seconds, or -1 for ever; ResourceError if its file can't be written.
    """
    from filelock import Timeout

    try:
        try:
            lock.acquire(timeout=QUIET_SECONDS)
        except Timeout:
            if what and seconds < 0:
                print(f"waiting: another command on this machine {what}", file=sys.stderr, flush=True)
            lock.acquire(timeout=seconds)
    except Timeout:
        raise
    except OSError as cause:
        line = f"{lock.lock_file} can't be written ({one_line(cause)})"
        raise ResourceError(f"{line}; free some space, or set HOME to another folder") from cause
    try:
        yield
    finally:
        lock.release()
