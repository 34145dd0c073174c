"""Scans of a run's folder: the state of each file, the files that a script has open, logs, and quiet times."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ray_on_ecs.errors import counted
from ray_on_ecs.names import is_of_git

# Folders that hold nothing of a run, and core dumps.
NEVER = re.compile(r"\.venv|venv|__pycache__|node_modules|\..*_cache")
CORE_DUMP = re.compile(r"core(\.\d+)?")
# Names of logs, which a script that can't work writes, too; and of other files that are written until the run ends.
LOGS, EVENTS = (".log", ".out", ".err", ".txt"), "events.out.tfevents"
GROWING = (".jsonl", ".csv", ".wandb", "-wal", "-journal")
# A folder with more entries than this is left out.
MAX_ENTRIES = 10_000
# A file that has changed for this time without a pause is a log. One that was open in all scans has longer: it may be a
# checkpoint that is being written.
RESTLESS_SECONDS, OPEN_SECONDS = 30.0, 300.0
PAUSE_SECONDS = 2.0
LOG_SECONDS = 10.0


class FileState(NamedTuple):
    """State of a file; it differs once the file is written again.

    Attributes:
        inode: Its inode.
        size: Its size in bytes.
        written_at: When it was last written (ns).
        mode: Its permissions.
        link: The target of a symbolic link, or None.
    """

    inode: int
    size: int
    written_at: int
    mode: int
    link: str | None


Scan = dict[str, FileState]


def state_of(path: str | Path) -> FileState | None:
    """Return the state of a regular file or a symbolic link; None for anything else, as for a socket."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return FileState(status.st_ino, 0, 0, 0, os.readlink(path))
        if stat.S_ISREG(status.st_mode):
            return FileState(status.st_ino, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode), None)
    return None


class FolderScanner:
    """Scans one folder again and again.

    Args:
        folder: The folder.
        is_excluded: Returns True for a path in the folder that is left out with all below it; the second argument says
            if it is a folder.

    Attributes:
        too_many: The folders that are left out because of their many entries; they are not listed again.
        unreadable: The folders that the last scan had no permission to list.
    """

    def __init__(self, folder: Path, is_excluded: Callable[[str, bool], bool] = lambda name, is_folder: False) -> None:
        self.folder = folder
        self._is_excluded = is_excluded
        self.too_many: set[str] = set()
        self.unreadable: set[str] = set()

    def scan(self) -> Scan:
        """Return the state of each file by its path in the folder.

        Raises:
            OSError: The folder can't be listed.
        """
        files: Scan = {}
        self.unreadable.clear()
        folders = [""]
        while folders:
            prefix = folders.pop()
            for entry in self._entries(prefix):
                name, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
                if self._is_excluded(name, is_folder) or is_of_git(entry.name):
                    continue
                if is_folder:
                    if not NEVER.fullmatch(entry.name) and f"{name}/" not in self.too_many:
                        folders.append(f"{name}/")
                elif not CORE_DUMP.fullmatch(entry.name):
                    state = state_of(entry.path)
                    if state:
                        files[name] = state
        return files

    def _entries(self, prefix: str) -> list[os.DirEntry[str]]:
        entries = []
        # The script may have deleted it. Any other fault must not look as if all files in it were gone.
        try:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder / prefix) as listed:
                for entry in listed:
                    entries.append(entry)
                    if len(entries) > MAX_ENTRIES and prefix:
                        self.too_many.add(prefix)
                        return []
        except PermissionError:
            self.unreadable.add(prefix or "./")
        return entries


def is_log(name: str) -> bool:
    """Return whether a file is a log by its name."""
    return name.endswith(LOGS) or os.path.basename(name).startswith(EVENTS)


def is_growing(name: str) -> bool:
    """Return whether a file is written until the run ends, by its name."""
    return is_log(name) or name.endswith(GROWING)


def open_for_writing(folder: Path, processes: Iterable[psutil.Process]) -> dict[str, bool]:
    """Return the files in a folder that processes hold open for writing; the value is True for append mode only."""
    open_files: dict[str, bool] = {}
    prefix = f"{os.path.realpath(folder)}/"
    for process in processes:
        with suppress(psutil.Error, OSError):
            for file in process.open_files():
                mode = getattr(file, "mode", "r")
                if mode != "r" and file.path.startswith(prefix):
                    name = file.path.removeprefix(prefix)
                    open_files[name] = mode.startswith("a") and open_files.get(name, True)
    return open_files


def select_within_limits(files: Scan, max_bytes: float, max_files: int) -> tuple[set[str], list[str]]:
    """Select the files to keep: the largest entries of the top level are left out until the rest is within the limits.

    Returns:
        The names of the selected files, and a line for each entry that is left out, with its number of files and size.
    """
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, state in files.items():
        sizes[_group(name)] += state.size
        counts[_group(name)] += 1
    left_out: dict[str, str] = {}
    while sizes.total() > max_bytes or counts.total() > max_files:
        [(group, _)] = sizes.most_common(1) if sizes.total() > max_bytes else counts.most_common(1)
        left_out[group] = f"{group} ({counted(counts.pop(group), 'file')}, {sizes.pop(group) / 2**30:.1f} GiB)"
    return {name for name in files if _group(name) not in left_out}, list(left_out.values())


def _group(name: str) -> str:
    """Return the entry of the top level that holds a file: parts of a checkpoint are left out together."""
    top, below, _ = name.partition("/")
    return top + below


class FolderActivity:
    """Compares each scan of a folder with the earlier ones.

    Args:
        files: The scan before the first.

    Attributes:
        logs: The files that are written until the run ends; a part need not wait for them.
        busy: The other files that were open for writing in the last scan.
        data: The files of the last scan that are not logs.
        quiet_since: The time since which `data` has not changed.
    """

    def __init__(self, files: Scan) -> None:
        self.logs: set[str] = set()
        self.busy: set[str] = set()
        self.data: Scan = {}
        self.quiet_since = 0.0
        self._files = files
        self._changing: dict[str, tuple[float, float]] = {}  # since when, and when last
        self._open_since: dict[str, float] = {}
        self._grown_at: dict[str, float] = {}  # of files that are logs by their names

    def update(self, files: Scan, open_files: Mapping[str, bool], now: float) -> None:
        """Take a new scan into account.

        Args:
            files: The scan.
            open_files: The files that are open for writing; the value is True for append mode only.
            now: The time of the scan.
        """
        changed = {name for name, state in files.items() if self._files.get(name, state) != state}
        self._files = files
        # By their times: scans may follow each other sooner than the changes.
        going_on = {name: times for name, times in self._changing.items() if now - times[1] < PAUSE_SECONDS}
        self._changing = going_on | {name: (self._changing.get(name, (now, now))[0], now) for name in changed}
        self._open_since = {name: self._open_since.get(name, now) for name in open_files}
        self._grown_at |= dict.fromkeys(filter(is_growing, changed), now)
        appended = {name for name, is_appended in open_files.items() if is_appended or is_growing(name)}
        growing = {name for name, grown_at in self._grown_at.items() if now - grown_at < LOG_SECONDS}
        restless: set[str] = set()
        for name, (since, _) in self._changing.items():
            if now - since >= RESTLESS_SECONDS and self._open_since.get(name, now) > since:
                restless.add(name)
        long_open = {name for name, since in self._open_since.items() if now - since >= OPEN_SECONDS}
        self.logs = (appended | growing | long_open | restless) & files.keys()
        self.busy = (open_files.keys() & files.keys()) - self.logs
        data = without_logs(files, self.logs)
        if data != self.data or self.busy:
            self.data, self.quiet_since = data, now


def without_logs(files: Mapping[str, FileState], logs: set[str]) -> Scan:
    """Return the states of the files that are not logs."""
    return {name: state for name, state in files.items() if name not in logs}
