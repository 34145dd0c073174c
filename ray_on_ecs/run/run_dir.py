"""A script's own folder, `$RUN_DIR`: what it writes there is soon in the run's folder, and is back after a restart.

Where the storage path is a folder that all nodes share, `$RUN_DIR` is a folder of it and nothing needs to be copied.
With a bucket each node has a copy on its disk. A file is stored when it is complete: when it has not changed for a
moment, or has replaced another one of its name, and the script does not hold it open to write it. Readers find the old
file or the new one, because S3 replaces whole objects. Of a file that several nodes write, the last one is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from pyarrow import fs

from ray_on_ecs.filesystem import copy_to_disk
from ray_on_ecs.node_folder import node_folder
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

STORE_SECONDS = 2.0
# A file that is held open but has not changed for so long is a log: it is stored as it is.
IDLE_SECONDS = 30.0


class State(NamedTuple):
    """What tells whether a file has changed: its inode, its size in bytes, when it was written (ns), if renamed since.

    A rename changes the time of the inode and not that of the content.
    """

    inode: int
    size: int
    written: int
    is_renamed: bool


def local_folder(storage: RunStorage) -> Path:
    """Return `$RUN_DIR` of this node."""
    if storage.is_local:
        return Path(storage.path(layout.FILES_FOLDER))
    return node_folder("runs", storage.uri)


class RunFolder:
    """`$RUN_DIR` of one node, and the copy of it in the storage.

    Args:
        storage: The run's folder.
        folder: The node's own, as `local_folder` says.
        is_first: Whether it is the first node: every node has what was restored, and the first one alone deletes it.
    """

    def __init__(self, storage: RunStorage, folder: Path, is_first: bool = True) -> None:
        self._storage = storage
        self._folder = folder
        self._is_first = is_first
        self._of_others: set[str] = set()
        self._stored: dict[str, State] = {}
        self._seen: dict[str, tuple[State, float]] = {}

    def restore(self) -> None:
        """Make the node's folder as it is in the storage.

        Raises:
            OSError: A file can't be read from the storage, or not be written here.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._storage.is_local:
            return
        remote = self._storage.files(layout.FILES_FOLDER)
        here = self._scan()
        for name in here.keys() - remote.keys():
            (self._folder / name).unlink()
        # A file that is restored has the time of its object.
        changed = {
            self._folder / name: found
            for name, found in remote.items()
            if name not in here or (here[name].size, here[name].written) != (found.size, found.mtime_ns)
        }
        copy_to_disk(self._storage.filesystem, changed)
        for path, found in changed.items():
            os.utime(path, ns=(found.mtime_ns, found.mtime_ns))
        self._stored = self._scan()
        self._of_others = set() if self._is_first else set(self._stored)

    def store(self, now: float, writers: Iterable[psutil.Process] = (), is_last: bool = False) -> None:
        """Store the files that are complete, and delete those from the storage that are gone here.

        Args:
            now: The time, in seconds of any clock.
            writers: The script's processes.
            is_last: Whether these have ended, so that every file is complete.

        Raises:
            OSError: The storage can't be written; the next call tries again.
        """
        if self._storage.is_local:
            return
        here = self._scan()
        being_written = set() if is_last else {os.path.realpath(each) for each in _open_to_write(writers)}
        a_new_one_waits = False  # so what was renamed after it, or deleted, may be of no use without it
        for name, state in sorted(here.items(), key=lambda each: each[1].written):
            if self._stored.get(name) == state:
                continue
            known, since = self._seen.get(name, (None, now))
            if known != state:
                self._seen[name] = state, now
                since = now
            is_open = os.path.realpath(self._folder / name) in being_written
            has_replaced = known is not None and (known.inode != state.inode or state.is_renamed)
            is_complete = is_last or known == state or (has_replaced and not a_new_one_waits)
            if is_complete and (not is_open or now - since >= IDLE_SECONDS):
                self._upload(name, state)
            elif not is_open and name not in self._stored:
                a_new_one_waits = True
        if not a_new_one_waits:
            self._delete(self._stored.keys() - here.keys())

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._of_others:
                self._storage.delete(f"{layout.FILES_FOLDER}/{name}")
            del self._stored[name]

    def _upload(self, name: str, state: State) -> None:
        with suppress(FileNotFoundError):  # the script has just deleted it
            fs.copy_files(
                str(self._folder / name),
                self._storage.path(layout.FILES_FOLDER, name),
                source_filesystem=fs.LocalFileSystem(),
                destination_filesystem=self._storage.filesystem,
            )
            self._stored[name] = state
            self._of_others.discard(name)

    def _scan(self) -> dict[str, State]:
        return {str(path.relative_to(self._folder)): state for path, state in _files(self._folder)}


def _files(folder: Path) -> Iterator[tuple[Path, State]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                found = path.stat()
                yield path, State(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns > found.st_mtime_ns)


def _open_to_write(processes: Iterable[psutil.Process]) -> Iterator[str]:
    for process in processes:
        with suppress(psutil.Error):
            for each in process.open_files():
                if getattr(each, "mode", "r") in ("w", "r+"):
                    yield each.path
