"""Copies of files at one moment; the script may rewrite, replace or delete the files themselves meanwhile."""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
from collections.abc import Collection, Generator, Iterable, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from ray_on_ecs.errors import DISK_FULL, one_line
from ray_on_ecs.run.files.scan import FileState, Scan, state_in

# A larger file has a hard link instead of a copy, unless it is always being written.
COPIED_BYTES = 64 * 2**10
CHUNK_BYTES = 16 * 2**20
# Copies of a file that is written while it is copied.
TRIES = 3
SQLITE = b"SQLite format 3\0"
# Files beside a SQLite database that complete it; a backup has their content.
COMPANIONS = ("-wal", "-shm", "-journal")
LOCKED_SECONDS = 1.0
# Pages of a database that are copied at once, as a commit waits so long. One that changes all the time is copied whole
# if it is not larger than this, which takes some two seconds.
PAGES, WHOLE_BYTES = 256, 2**28


@dataclass(frozen=True)
class Copy:
    """A copy of a file."""

    path: Path  # of the copy, a hard link, or the file itself where the disk has no links
    size: int  # the bytes of it that count
    state: FileState  # of the file that had this content
    is_shared: bool  # the file itself may still be written


@dataclass
class Frozen:
    """Copies by the names of the files, and the reasons why others could not be copied."""

    copies: dict[str, Copy] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@contextmanager
def freeze(
    folder: Path, to: Path, files: Scan, names: Collection[str], logs: Set[str], *, has_ended: bool = False
) -> Generator[Frozen]:
    """Yield copies of files that were in these states; hard links, which need no space, if the script has ended.

    Those that are logs are copied as they are at one moment: up to the length that they have then. The others are only
    as they were if their states are the same afterwards, and those of hard links at the end.

    Raises:
        OSError: The disk is full.
    """
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    frozen = Frozen()
    try:
        for number, name in enumerate(sorted(names)):
            kind = "log" if name in logs else "link" if has_ended or files[name].size > COPIED_BYTES else "copy"
            try:
                frozen.copies[name] = _copy(folder / name, to / str(number), files[name], kind)
            except OSError as cause:  # such as a database that is locked, or a file that the script has just deleted
                if cause.errno in DISK_FULL:
                    raise
                frozen.failed[name] = one_line(cause)
        yield frozen
    finally:
        shutil.rmtree(to, ignore_errors=True)


def _copy(source: Path, target: Path, state: FileState, kind: Literal["log", "link", "copy"]) -> Copy:
    if kind == "log" and is_database(source):
        _back_up(source, target)
        return Copy(target, target.stat().st_size, state, is_shared=False)
    if kind == "log":
        return _copy_moving(source, target)
    if kind == "copy":
        with open_regular(source) as reader, target.open("wb") as writer:
            copy_bytes(reader, writer, state.size)
        return Copy(target, state.size, state, is_shared=False)
    try:
        os.link(source, target)
    except OSError:  # the disk does not support hard links
        target = source
    return Copy(target, state.size, state, is_shared=True)


def _copy_moving(source: Path, target: Path) -> Copy:
    """Copy a file that may be written meanwhile, at a moment when it is not, or else by the length that it has had."""
    with open_regular(source) as reader:
        for _ in range(TRIES):
            state = state_in(os.fstat(reader.fileno()))
            if state.size > CHUNK_BYTES:  # a long log is never at rest, and only grows
                with suppress(OSError):  # the disk does not support hard links
                    os.link(source, target, follow_symlinks=False)
                    break
            reader.seek(0)
            with target.open("wb") as writer:
                copy_bytes(reader, writer, state.size)
            if state.size > CHUNK_BYTES or state_in(os.fstat(reader.fileno())) == state:
                break
    return Copy(target, state.size, state, is_shared=False)


def is_database(path: Path) -> bool:
    """Return whether a file is a SQLite database."""
    try:
        with open_regular(path) as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def companions(databases: Iterable[str]) -> set[str]:
    """Return the names of the files that SQLite has beside databases."""
    return {name + suffix for name in databases for suffix in COMPANIONS}


def _back_up(source: Path, target: Path) -> None:
    """Copy a SQLite database by SQLite's backup, between two transactions of the script, which can commit meanwhile.

    Raises:
        OSError: It is locked, broken, or changes in each of several attempts.
    """
    import sqlite3  # a Python may be built without it

    attempts, missing, is_whole = 0, math.inf, False

    def look(status: int, remaining: int, total: int) -> None:
        nonlocal attempts, missing
        attempts += remaining >= missing  # SQLite begins again after a commit
        missing = remaining
        if status not in (sqlite3.SQLITE_OK, sqlite3.SQLITE_DONE):  # `backup` would wait for a lock for ever
            raise sqlite3.OperationalError("database is locked")
        if attempts == TRIES and not is_whole:
            raise sqlite3.OperationalError(f"it has changed in {TRIES} attempts to copy it")

    address = f"{source.absolute().as_uri()}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(address, uri=True, timeout=LOCKED_SECONDS, isolation_level=None)) as database,
            closing(sqlite3.connect(target)) as copy,
        ):
            # With a write-ahead log, a script commits while the database is read.
            is_logged = database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            try:
                database.backup(copy, pages=-1 if is_logged else PAGES, progress=look)
            except sqlite3.Error:
                if attempts < TRIES or source.stat().st_size > WHOLE_BYTES:
                    raise
                is_whole = True  # a commit waits for it
                database.backup(copy, pages=-1, progress=look)
    except sqlite3.Error as cause:
        raise OSError(f"SQLite: {one_line(cause)}") from cause


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it.

    Raises:
        OSError: It can't be read, or something else is in its place, such as a pipe, which does not block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def copy_bytes(source: IO[bytes], target: Any, size: int) -> int:
    """Copy at most so many bytes; return how many there were."""
    left = size
    while left and (content := source.read(min(left, CHUNK_BYTES))):
        target.write(content)
        left -= len(content)
    return size - left
