"""Scans of a run's folder: the state of each file, the files that a script has open, logs, and quiet times."""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ray_on_ecs.errors import counted
from ray_on_ecs.names import folders_of, is_of_git

# Folders that hold nothing of a run, and core dumps.
NEVER = re.compile(r"\.venv|venv|__pycache__|node_modules|\..*_cache")
CORE_DUMP = re.compile(r"core(\.\d+)?")
# Names of logs, which a script that can't work writes, too; and of other files that are written until the run ends.
LOGS, EVENTS = (".log", ".out", ".err"), "events.out.tfevents"
GROWING = (".jsonl", ".csv", ".wandb")
# A folder with more entries than this is left out.
MAX_ENTRIES = 10_000
# A file that has changed for this time without a pause is a log.
RESTLESS_SECONDS = 30.0
# So is one that was open in all scans of the first time and has grown slowly. Another one has the second: it may be a
# checkpoint that is being written.
SLOW_SECONDS, OPEN_SECONDS = 30.0, 300.0
SLOW_BYTES = 16 * 2**20
PAUSE_SECONDS = 2.0
# The clock of a disk may be this late.
TICK_SECONDS = 0.05
# Looks take at most one part in so many of the time.
SHARE = 20


class Looks:
    """Times of looks at files and processes: those of a large run take long, and the script needs the CPU."""

    def __init__(self) -> None:
        self._next_at = 0.0

    @property
    def are_due(self) -> bool:
        """True if the earlier ones have had a small share of the time."""
        return time.monotonic() >= self._next_at

    @contextmanager
    def measured(self) -> Generator[None]:
        """Count the time of a block."""
        began = time.monotonic()
        yield
        self._next_at = max(self._next_at, began) + SHARE * (time.monotonic() - began)


class FileState(NamedTuple):
    """State of a file; it differs once the file is written again."""

    inode: int
    size: int
    written_at: int  # ns since 1970
    mode: int
    link: str | None  # the target of a symbolic link


Scan = dict[str, FileState]


def state_of(path: str | Path) -> FileState | None:
    """Return the state of a regular file or a symbolic link; None for anything else, as for a socket."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return FileState(status.st_ino, 0, 0, 0, os.readlink(path))
        if stat.S_ISREG(status.st_mode):
            return state_in(status)
    return None


def state_in(status: os.stat_result) -> FileState:
    """Return the state of a regular file."""
    return FileState(status.st_ino, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode), None)


class FolderScanner:
    """Scans one folder again and again.

    Args:
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
                if self._skips(name, entry.name, is_folder):
                    continue
                if is_folder:
                    folders.append(f"{name}/")
                else:
                    state = state_of(entry.path)
                    if state:
                        files[name] = state
        return files

    def skips(self, name: str) -> bool:
        """Return whether a file is left out, or a folder that holds it."""
        folders = [(folder, os.path.basename(folder), True) for folder in folders_of(name)]
        return any(self._skips(*each) for each in (*folders, (name, os.path.basename(name), False)))

    def _skips(self, path: str, name: str, is_folder: bool) -> bool:
        if self._is_excluded(path, is_folder) or is_of_git(name):
            return True
        if is_folder:
            return NEVER.fullmatch(name) is not None or f"{path}/" in self.too_many
        return CORE_DUMP.fullmatch(name) is not None

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
    return name.endswith((*LOGS, ".txt")) or os.path.basename(name).startswith(EVENTS)


def is_growing(name: str) -> bool:
    """Return whether a file is written until the run ends, by its name; a text file may name the newest checkpoint."""
    return name.endswith(GROWING) or (is_log(name) and not name.endswith(".txt"))


def open_for_writing(
    folder: Path, processes: Iterable[psutil.Process], see: Callable[[str], None] = lambda path: None
) -> dict[str, bool]:
    """Return the files in a folder that processes hold open for writing; the value is True for append mode only.

    `see` gets the paths of other files.
    """
    open_files: dict[str, bool] = {}
    prefix = f"{os.path.realpath(folder)}/"
    for process in processes:
        with suppress(psutil.Error, OSError):
            for file in process.open_files():
                mode = getattr(file, "mode", "r")
                if mode != "r" and not file.path.startswith(prefix):
                    see(file.path)
                elif mode != "r":
                    name = file.path.removeprefix(prefix)
                    open_files[name] = mode.startswith("a") and open_files.get(name, True)
    return open_files


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


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
        held: Files that are open until the run ends: a kill does not leave them half-written, but at another length.
        logs: These, and files that are rewritten without a pause; a part need not wait for either.
        busy: The other files that were open for writing in the last scan.
        data: The files of the last scan that are not logs.
        quiet_since: The time since which `data` has not changed.
    """

    def __init__(self, files: Scan) -> None:
        self.held: set[str] = set()
        self.logs: set[str] = set()
        self.busy: set[str] = set()
        self.data: Scan = {}
        self.quiet_since = 0.0
        self._files = files
        self._changing: dict[str, tuple[float, float]] = {}  # since when, and when last
        self._open_since: dict[str, tuple[float, FileState]] = {}  # and the state then

    def update(self, files: Scan, open_files: Mapping[str, bool], now: float, databases: Set[str]) -> None:
        """Take a new scan into account.

        Files that are open for writing have True for append mode only; those of databases can be copied meanwhile.
        """
        changed = {name for name, state in files.items() if self._files.get(name, state) != state}
        self._files = files
        # By their times: scans may follow each other sooner than the changes.
        going_on = {name: times for name, times in self._changing.items() if now - times[1] < PAUSE_SECONDS}
        self._changing = going_on | {name: (self._changing.get(name, (now, now))[0], now) for name in changed}
        states = {name: files[name] for name in open_files if name in files}
        self._open_since = {name: self._open_since.get(name, (now, state)) for name, state in states.items()}
        held = {name for name in states if open_files[name] or self._is_held(name, states[name], now)}
        self.held = (held | databases) & files.keys()
        restless: set[str] = set()
        for name, (since, _) in self._changing.items():
            opened_at = self._open_since[name][0] if name in self._open_since else now
            if now - since >= RESTLESS_SECONDS and opened_at > since:
                restless.add(name)
        self.logs = self.held | (restless & files.keys())
        self.busy = states.keys() - self.logs
        data = without_logs(files, self.logs)
        if data != self.data or self.busy:
            self.data, self.quiet_since = data, now

    def _is_held(self, name: str, state: FileState, now: float) -> bool:
        """Return whether a file that is open for writing will be so until the run ends.

        One that is written and does not grow may be a checkpoint whose room was allocated before.
        """
        since, first = self._open_since[name]
        growth = state.size - first.size
        if is_growing(name) and growth > 0:
            return now - since >= PAUSE_SECONDS
        is_slow = state == first or 0 < growth < SLOW_BYTES
        return now - since >= (SLOW_SECONDS if is_slow else OPEN_SECONDS)


def without_logs(files: Mapping[str, FileState], logs: Set[str]) -> Scan:
    """Return the states of the files that are not logs."""
    return {name: state for name, state in files.items() if name not in logs}
