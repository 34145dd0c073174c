"""One command per run, wherever it is started: a lock in the run's folder that its owner keeps refreshing.

S3's conditional writes decide who gets it (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html),
on a disk exclusive creation and renaming. A lock whose owner has died is taken over: at once if that was a process of
this machine, else when it hasn't been refreshed for a while by this machine's own clock.

A write may succeed although its answer is lost, and its repetition then fails: the lock is another version by now. So
each owner has a token, and no two writes are alike: only a lock with another token is another command's.
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
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import psutil
from pyarrow import fs

from ray_on_ecs.errors import UsageError
from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

REFRESH_SECONDS = 15.0
STALE_SECONDS = 60.0
POLL_SECONDS = 1.0
# A call that hangs must not take as long as a lock needs to become stale.
CALL_SECONDS = 10
# How often a write is tried again because the lock has changed, as with S3's ConditionalRequestConflict.
WRITE_ATTEMPTS = 5
NOT_THIS_VERSION = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")


@contextmanager
def hold_lock(storage: RunStorage, say: Callable[[str], None]) -> Generator[RunLock]:
    """Hold the lock of a run and keep refreshing it, until the block ends.

    If another command takes the run over, because this one was silent for too long, this process gets SIGTERM.

    Args:
        storage: The run's folder.
        say: Told why this command waits or ends.

    Yields:
        The lock.

    Raises:
        UsageError: Another command trains the run.
    """

    def refresh() -> None:
        if not lock.refresh():
            say("another command has taken this run over")
            os.kill(os.getpid(), signal.SIGTERM)

    with RunLock(storage, say) as lock, run_every(REFRESH_SECONDS, refresh, "run lock"):
        yield lock


class HeldError(UsageError):
    """Another command holds the run's lock."""


class RunLock:
    """Holds the lock of a run; a context. Call `refresh` every `REFRESH_SECONDS`.

    Args:
        storage: The run's folder.
        say: Told why this command waits.

    Raises:
        UsageError: Another command holds it and is alive.
    """

    def __init__(self, storage: RunStorage, say: Callable[[str], None] = print) -> None:
        self._storage = storage
        self._say = say
        self._token = uuid.uuid4().hex
        self._file = _file(storage, self._token)
        self._version: str | None = None
        self._refreshed_at = 0.0
        self._has_ended = False
        self._count = 0

    def __enter__(self) -> RunLock:
        if (other := self._write(None, may_create=True)) is not None:
            self._take_over(other)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True  # a refresh in progress writes no new lock
        if self._version:
            with suppress(OSError):  # it goes stale
                self._file.delete(self._is_mine)

    @property
    def is_held(self) -> bool:
        """Whether no other command has taken it over, as far as is known here."""
        return self._version is not None

    def refresh(self) -> bool:
        """Show that the owner is alive; returns False if another command has taken the lock over.

        A storage that doesn't answer is not another command. A lock that is gone was deleted by a person, and is
        written again. If it could have become stale before, another command may have taken it over and ended.
        """
        if self._version is None:
            return False
        is_fresh = time.time() - self._refreshed_at < STALE_SECONDS
        try:
            other = self._write(self._version, may_create=is_fresh and not self._has_ended)
        except OSError:
            return True
        if other is not None and not self._has_ended:  # else this command itself has deleted it
            self._version = None
        return self._version is not None

    def _write(self, replaces: str | None, *, may_create: bool) -> _Seen | None:
        """Write the lock if it has this version, None for no lock, or is this owner's.

        Returns:
            What is there instead, if it is another owner's or nothing; None if the lock is written.
        """
        for _ in range(WRITE_ATTEMPTS):
            began, content = time.time(), self._content()
            version = self._file.write(json.dumps(content).encode(), replaces)
            if version is None:
                seen = self._file.read()
                if seen.content == content:  # the answer was lost
                    version = seen.version
            if version is not None:
                self._version, self._refreshed_at = version, began
                return None
            if seen.version == replaces:  # other requests were in progress
                time.sleep(POLL_SECONDS)
            elif not (may_create if seen.version is None else self._is_mine(seen.content)):
                return seen
            replaces = seen.version
        raise OSError("the lock of the run can't be written: it changes all the time")

    def _is_mine(self, content: Mapping[str, Any]) -> bool:
        return content.get("token") == self._token

    def _take_over(self, seen: _Seen) -> None:
        since = time.monotonic()
        said = False
        while True:
            if seen.version is None or _is_dead(seen.content) or time.monotonic() - since > STALE_SECONDS:
                if (other := self._write(seen.version, may_create=True)) is None:
                    return
                raise self._refusal(other)
            if not said:
                self._say(
                    f"waiting up to {STALE_SECONDS:.0f} s to see whether {_owner(seen.content)} still trains this run"
                )
                said = True
            time.sleep(POLL_SECONDS)
            now = self._file.read()
            if now.version is not None and now.version != seen.version:
                raise self._refusal(now)
            seen = now

    def _refusal(self, seen: _Seen) -> HeldError:
        return HeldError(
            f"--run-name: run {self._storage.run_name!r} is being trained by {_owner(seen.content)}; wait for it or "
            "stop it, or give another --run-name"
        )

    def _content(self) -> dict[str, Any]:
        """Return what is written next, which is never the same twice."""
        self._count += 1
        process = psutil.Process()
        owner = {"host": socket.gethostname(), "pid": process.pid, "created": process.create_time()}
        return {**owner, "token": self._token, "refreshed": self._count}


class _Seen(NamedTuple):
    """A version of the lock and what it says; None and nothing if there is no lock."""

    version: str | None
    content: Mapping[str, Any]


class _LockFile(Protocol):
    """A file of which every content has a version."""

    def write(self, content: bytes, replaces: str | None) -> str | None:
        """Write if the file has this version, None for no file; returns the new version, or None if it may not be so.

        It may be written nevertheless.
        """
        ...

    def read(self) -> _Seen:
        """Return the version and the content."""
        ...

    def delete(self, is_mine: Callable[[Mapping[str, Any]], bool]) -> None:
        """Delete the file if its content is the owner's."""
        ...


class _Object:
    """An object in S3, whose version is its ETag."""

    def __init__(self, storage: RunStorage) -> None:
        self._bucket, _, self._key = storage.path(layout.LOCK).partition("/")
        self._region = getattr(storage.filesystem, "region", None)

    def write(self, content: bytes, replaces: str | None) -> str | None:
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        return self._call(
            lambda: self._client.put_object(Bucket=self._bucket, Key=self._key, Body=content, **condition)["ETag"]
        )

    def read(self) -> _Seen:
        def get() -> _Seen:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key)
            return _Seen(answer["ETag"], _parsed(answer["Body"].read()))

        return self._call(get) or _Seen(None, {})

    def delete(self, is_mine: Callable[[Mapping[str, Any]], bool]) -> None:
        if is_mine(self.read().content):
            self._call(lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key))

    def _call(self, call: Callable[[], Any]) -> Any:
        """Make a call; None if its condition doesn't hold or there is no such object, OSError if it fails."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return call()
        except ClientError as cause:
            if cause.response["Error"]["Code"] in NOT_THIS_VERSION:
                return None
            raise OSError(str(cause)) from cause
        except BotoCoreError as cause:
            raise OSError(str(cause)) from cause

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(retries={"mode": "standard"}, connect_timeout=CALL_SECONDS, read_timeout=CALL_SECONDS)
        return boto3.client("s3", region_name=self._region, config=config)


class _LocalFile:
    """A file on a disk, whose version is its content. The last command that replaces it wins."""

    def __init__(self, storage: RunStorage, token: str) -> None:
        self._path = Path(storage.path(layout.LOCK))
        self._new = self._path.with_name(f"{self._path.name}.{token}")

    def write(self, content: bytes, replaces: str | None) -> str | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._new.write_bytes(content)
            if replaces is None:
                os.link(self._new, self._path)  # fails if it is there, on shared file systems too
            elif self.read().version == replaces:
                self._new.replace(self._path)
            else:
                return None
        except FileExistsError:
            return None
        finally:
            self._new.unlink(missing_ok=True)
        return content.decode()

    def read(self) -> _Seen:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return _Seen(None, {})
        return _Seen(content.decode(errors="replace"), _parsed(content))

    def delete(self, is_mine: Callable[[Mapping[str, Any]], bool]) -> None:
        if is_mine(self.read().content):
            self._delete_left_over()
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # unless the run has left something
                self._path.parent.rmdir()

    def _delete_left_over(self) -> None:
        """Delete the new files of commands that were killed before these had replaced the lock."""
        now = self._path.stat().st_mtime
        for each in self._path.parent.glob(f"{self._path.name}.*"):
            with suppress(FileNotFoundError):
                if now - each.stat().st_mtime > STALE_SECONDS:
                    each.unlink()


def _file(storage: RunStorage, token: str) -> _LockFile:
    return _LocalFile(storage, token) if isinstance(storage.filesystem, fs.LocalFileSystem) else _Object(storage)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _owner(owner: Mapping[str, Any]) -> str:
    if not owner:
        return "another command"
    return f"another command (process {owner.get('pid')} on {owner.get('host')})"


def _is_dead(owner: Mapping[str, Any]) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(owner["pid"])
        return process.create_time() != owner["created"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
