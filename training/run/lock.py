"""One command per run, wherever it is started: a lock in the run's folder that its owner keeps refreshing.

S3's conditional writes decide who gets it (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html),
on a disk exclusive creation and renaming. A lock whose owner has died is taken over: at once if that was a process of
this machine, else when it hasn't been refreshed for a while by this machine's own clock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil
from pyarrow import fs

from training.errors import UsageError
from training.periodic import every
from training.run import layout
from training.run.storage import RunStorage

REFRESH_SECONDS = 15.0
STALE_SECONDS = 60.0
POLL_SECONDS = 1.0
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

    with RunLock(storage, say) as lock, every(REFRESH_SECONDS, refresh, "run lock"):
        yield lock


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
        self._file = _file(storage)
        self._version: str | None = None
        self._count = 0

    def __enter__(self) -> RunLock:
        self._version = self._file.write(self._content(), replaces=None)
        if self._version is None:
            self._take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._version:
            with suppress(OSError):  # it goes stale
                self._file.delete(self._version)

    @property
    def is_held(self) -> bool:
        """Whether no other command has taken it over, as far as is known here."""
        return self._version is not None

    def refresh(self) -> bool:
        """Show that the owner is alive; returns False if another command has taken the lock over.

        A storage that doesn't answer is not another command.
        """
        if self._version is None:
            return False
        try:
            self._version = self._file.write(self._content(), replaces=self._version)
        except OSError:
            return True
        return self._version is not None

    def _take_over(self) -> None:
        seen = self._file.read()
        since = time.monotonic()
        said = False
        while True:
            if seen is None or _is_dead(seen[1]) or time.monotonic() - since > STALE_SECONDS:
                version = self._file.write(self._content(), replaces=seen and seen[0])
                if version is not None:
                    self._version = version
                    return
                raise self._refusal(self._file.read())
            if not said:
                self._say(f"waiting up to {STALE_SECONDS:.0f} s to see whether {_owner(seen[1])} still trains this run")
                said = True
            time.sleep(POLL_SECONDS)
            now = self._file.read()
            if now is not None and now[0] != seen[0]:
                raise self._refusal(now)
            seen = now

    def _refusal(self, seen: tuple[str, dict[str, Any]] | None) -> UsageError:
        owner = _owner(seen[1] if seen else {})
        return UsageError(
            f"--run-name: run {self._storage.run_name!r} is being trained by {owner}; wait for it or stop it, or give "
            "another --run-name"
        )

    def _content(self) -> bytes:
        self._count += 1
        process = psutil.Process()
        owner = {"host": socket.gethostname(), "pid": process.pid, "created": process.create_time()}
        return json.dumps({**owner, "refreshed": self._count}).encode()


class _LockFile(Protocol):
    """A file of which every content has a version."""

    def write(self, content: bytes, replaces: str | None) -> str | None:
        """Write if the file has this version, None for no file; returns the new version, or None if it hasn't."""
        ...

    def read(self) -> tuple[str, dict[str, Any]] | None:
        """Return the version and the content, or None if there is no file."""
        ...

    def delete(self, version: str) -> None:
        """Delete the file if it has this version."""
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

    def read(self) -> tuple[str, dict[str, Any]] | None:
        def get() -> tuple[str, dict[str, Any]]:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key)
            return answer["ETag"], _parsed(answer["Body"].read())

        return self._call(get)

    def delete(self, version: str) -> None:
        found = self.read()
        if found and found[0] == version:
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

        return boto3.client("s3", region_name=self._region, config=Config(retries={"mode": "standard"}))


class _LocalFile:
    """A file on a disk, whose version is its content. Whoever replaces it waits for nobody: the last one wins."""

    def __init__(self, storage: RunStorage) -> None:
        self._path = Path(storage.path(layout.LOCK))

    def write(self, content: bytes, replaces: str | None) -> str | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        mine = self._path.with_name(f"{self._path.name}.{socket.gethostname()}.{os.getpid()}")
        mine.write_bytes(content)
        try:
            if replaces is None:
                os.link(mine, self._path)  # fails if it is there, on shared file systems too
            elif self._has(replaces):
                mine.replace(self._path)
            else:
                return None
        except FileExistsError:
            return None
        finally:
            mine.unlink(missing_ok=True)
        return content.decode()

    def read(self) -> tuple[str, dict[str, Any]] | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        return content.decode(errors="replace"), _parsed(content)

    def delete(self, version: str) -> None:
        if self._has(version):
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # unless the run has left something
                self._path.parent.rmdir()

    def _has(self, version: str) -> bool:
        found = self.read()
        return found is not None and found[0] == version


def _file(storage: RunStorage) -> _LockFile:
    return _LocalFile(storage) if isinstance(storage.filesystem, fs.LocalFileSystem) else _Object(storage)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _owner(owner: dict[str, Any]) -> str:
    if not owner:
        return "another command"
    return f"another command (process {owner.get('pid')} on {owner.get('host')})"


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(owner["pid"])
        return process.create_time() != owner["created"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
