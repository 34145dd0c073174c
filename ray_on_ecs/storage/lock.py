"""Lock of a run: a lease in the run's folder, which keeps a second command from training the same run.

S3's conditional writes make it exclusive (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html),
on a disk exclusive creation and renaming. The lock of a dead owner is taken over: at once if the owner was a process of
this boot of this machine, else once it hasn't been refreshed for a while by this machine's clock.

A write may succeed although its response is lost, and its retry then fails, because the lock has a new version. So each
owner has a token, and every write is unique: a lock with this owner's token is never mistaken for another command's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ray_on_ecs.errors import UsageError
from ray_on_ecs.periodic import run_every
from ray_on_ecs.private_folder import place
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import Disk, is_part
from ray_on_ecs.storage.run_storage import RunStorage

# Three refreshes may fail before another command takes the lock over, which waits for a minute.
REFRESH_SECONDS, STALE_SECONDS = 15.0, 60.0
# Of the kernel's time of boot, which a change of the clock moves by whole seconds.
CLOCK_SECONDS = 1.5
POLL_SECONDS = 1.0  # a request to S3 each
# A call that hangs must end before the lock becomes stale.
CALL_SECONDS, CALL_ATTEMPTS = 10.0, 3
# Attempts of a write while the lock changes, as with S3's ConditionalRequestConflict.
WRITE_ATTEMPTS = 5


@contextmanager
def hold_lock(storage: RunStorage, say: Callable[[str], None]) -> Generator[RunLock]:
    """Hold the lock of a run and refresh it until the block ends.

    This process gets SIGTERM if another command takes the run over, because this one did not refresh for too long.
    `say` prints why this command waits or ends. HeldError if another command trains the run.
    """

    def refresh() -> None:
        if not lock.refresh():
            say("another command has taken this run over")
            os.kill(os.getpid(), signal.SIGTERM)

    with RunLock(storage, say) as lock, run_every(REFRESH_SECONDS, refresh, "run lock"):
        yield lock


def has_dead_owner(storage: RunStorage) -> bool:
    """Return True if the lock of a run on a disk was a process of this machine, which has ended."""
    if storage.is_local:
        with suppress(OSError):
            return _is_dead(_parsed(storage.read(layout.LOCK)))
    return False


class HeldError(UsageError):
    """Another command holds the run's lock."""


class RunLock:
    """Lock of a run as a context manager; HeldError if another command holds it. Call `refresh` at an interval."""

    def __init__(self, storage: RunStorage, say: Callable[[str], None] = print) -> None:
        self._storage = storage
        self._say = say
        process = psutil.Process()
        owner = {"machine": place(), "pid": process.pid, "created": _created(process)}
        self._owner = {"host": socket.gethostname(), **owner, "token": uuid.uuid4().hex}
        store = storage.store
        self._store = store if isinstance(store, Disk) else store.with_limits(CALL_SECONDS, CALL_ATTEMPTS)
        self._path = storage.path(layout.LOCK)
        self._version: str | None = None
        self._refreshed_at = 0.0
        self._has_ended = False
        self._write_count = 0

    def __enter__(self) -> RunLock:
        other = self._write(None, may_create=True)
        if other is not None:
            self._take_over(other)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True  # a refresh in progress writes no new lock
        if self._version:
            with suppress(OSError):  # it goes stale
                if self._is_owned(self._read().content):
                    self._delete()

    @property
    def is_held(self) -> bool:
        """True until a refresh has found that another command has taken the lock over."""
        return self._version is not None

    def refresh(self) -> bool:
        """Renew the lease; returns False if another command has taken the lock over.

        A storage that doesn't answer changes nothing. A missing lock was deleted by a person and is written again,
        unless it may have become stale before: then another command may have taken it over and ended.
        """
        if self._version is None:
            return False
        is_fresh = _now() - self._refreshed_at < STALE_SECONDS
        try:
            other = self._write(self._version, may_create=is_fresh and not self._has_ended)
        except OSError:
            return True
        if other is not None and not self._has_ended:  # else this command itself has deleted it
            self._version = None
        return self._version is not None

    def _write(self, replaces: str | None, *, may_create: bool) -> _Version | None:
        """Write the lock if it has this version, None for a missing lock, or this owner's token.

        With `may_create` also a lock that has been deleted meanwhile. Returns the lock that is there instead, or None.
        """
        for _ in range(WRITE_ATTEMPTS):
            began = _now()
            self._write_count += 1  # makes every content unique
            content = {**self._owner, "refreshed": self._write_count}
            version = self._store.write_if(self._path, json.dumps(content).encode(), replaces)
            if version is None:
                current = self._read()
                if current.content == content:  # written, and the response was lost
                    version = current.version
            if version is not None:
                self._version = version
                self._refreshed_at = began
                return None
            may_replace = may_create if current.version is None else self._is_owned(current.content)
            if current.version == replaces:  # a conflict with a request in progress
                time.sleep(POLL_SECONDS)
            elif not may_replace:
                return current
            replaces = current.version
        raise OSError(f"the lock of the run could not be written in {WRITE_ATTEMPTS} attempts: it keeps changing")

    def _is_owned(self, content: Mapping[str, Any]) -> bool:
        return content.get("token") == self._owner["token"]

    def _read(self) -> _Version:
        version, content = self._store.read_version(self._path)
        return _Version(version, _parsed(content))

    def _delete(self) -> None:
        """Delete the lock, and on a disk the parts of files that killed commands were writing."""
        if isinstance(self._store, Disk):
            path = Path(self._path)
            now = path.stat().st_mtime
            for file in path.parent.iterdir():
                with suppress(FileNotFoundError):
                    if is_part(file.name) and now - file.stat().st_mtime > STALE_SECONDS:
                        file.unlink()
        self._store.delete(self._path)
        if isinstance(self._store, Disk):
            with suppress(OSError):  # the folder is not empty
                Path(self._path).parent.rmdir()

    def _take_over(self, current: _Version) -> None:
        """Wait until the other owner is known to be dead, and write the lock; HeldError if it is alive."""
        began = time.monotonic()
        is_announced = False
        while current.version is not None and not _is_dead(current.content):
            if time.monotonic() - began > STALE_SECONDS:
                break
            if not is_announced:
                owner = _owner_name(current.content)
                self._say(f"waiting up to {STALE_SECONDS:.0f} s to see whether {owner} still trains this run")
                is_announced = True
            time.sleep(POLL_SECONDS)
            previous, current = current, self._read()
            if current.version not in (None, previous.version):  # refreshed
                raise self._refusal(current)
        other = self._write(current.version, may_create=True)
        if other is not None:
            raise self._refusal(other)

    def _refusal(self, other: _Version) -> HeldError:
        return HeldError(
            f"--run-name: run {self._storage.run_name!r} is being trained by {_owner_name(other.content)}; wait for it "
            "or stop it, or give another --run-name"
        )


class _Version(NamedTuple):
    """Version of the lock and its content; None and empty for a missing lock."""

    version: str | None
    content: Mapping[str, Any]


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _owner_name(owner: Mapping[str, Any]) -> str:
    if not owner:
        return "another command"
    return f"another command (process {owner.get('pid')} on {owner.get('host')})"


def _is_dead(owner: Mapping[str, Any]) -> bool:
    """Return True if the owner was a process that this one could see, and has ended."""
    if owner.get("machine") != place():
        return False
    try:
        process = psutil.Process(owner["pid"])
        is_other = abs(_created(process) - owner["created"]) > CLOCK_SECONDS  # with a reused ID
        return is_other or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        try:
            os.kill(owner["pid"], 0)
        except PermissionError:  # another user's, which /proc may hide
            return False
        except (OSError, OverflowError):
            pass
        return True
    except (KeyError, TypeError, ValueError, psutil.AccessDenied):
        return False


def _created(process: psutil.Process) -> float:
    """Return the seconds from the boot to the start of a process: a change of the clock moves the times of both."""
    return process.create_time() - psutil.boot_time()


def _now() -> float:
    """Return seconds that go on while the machine sleeps, and that a change of its clock leaves alone."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
