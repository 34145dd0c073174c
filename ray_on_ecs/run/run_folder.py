"""A run's folder on one node: it begins with the user's code, and what the script changes in it is soon in the storage.

A part is stored when nothing in the folder has changed for a moment and nothing is open for writing. The parts of all
nodes are a snapshot (run/snapshot_rounds.py), from which a restart begins.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ray_on_ecs import node_cache
from ray_on_ecs.errors import one_line
from ray_on_ecs.node_folder import node_folder
from ray_on_ecs.run.folder_scan import (
    MAX_ENTRIES,
    FileState,
    FolderScanner,
    Scan,
    fitting,
    grows,
    open_for_writing,
    state_of,
)
from ray_on_ecs.run.gitignore import from_options
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.snapshot import (
    KeptFile,
    Snapshot,
    copy_on_disk,
    delete_others,
    key_of,
    read_snapshot,
    restore,
    write_snapshot,
)
from ray_on_ecs.tracking.storage import RunStorage

# How often a node is asked if it is time for a scan, and how often it is: a scan takes at most this part of the time.
POLL_SECONDS, SCAN_SECONDS, SCAN_SHARE = 0.5, 2.0, 20
QUIET_SECONDS = 2.0
# After this time without such a pause, scans in quick succession find a short one.
OVERDUE_SECONDS, LOOK_SECONDS, LOOKS = 15.0, 0.2, 10
# A file that has changed in every scan for so long is a log. One that was held open meanwhile may be a checkpoint that
# is being written: it has longer.
RESTLESS_SECONDS, HELD_SECONDS = 30.0, 300.0
LOG_SECONDS = 10.0
MAX_FILES = 20_000
UPLOADS_AT_ONCE = 8
CHUNK_BYTES = 16 * 2**20
COPIED_BYTES = 64 * 2**10
# How the folder is called, with a random number, while another takes its place.
BEFORE = ".before-"
ROOM_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Part:
    """Stored state of one node's folder.

    Attributes:
        number: Counts the parts of a node since the folder was reset.
        files: The files that are stored.
        states: Their states on the node's disk, also of files that are not stored.
        left_out: Lines that name what is not kept.
    """

    number: int = 0
    files: Mapping[str, KeptFile] = field(default_factory=dict)
    states: Mapping[str, FileState] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


class RunFolder:
    """The folder of one node.

    Args:
        storage: The run's folder in the storage.
        name: The name of the folder with the user's code.
        node: The node's rank.
        node_id: The node's ID, if another node is on its machine.
        place_code: Writes the user's code into a new folder.
        is_direct: True on the only node of a run whose storage is a folder, into which the script itself may write.
        exclude: Patterns, as in .gitignore, of files that are not kept.
        max_bytes: The bytes of all files that are kept.

    Attributes:
        folder: The working directory of the script.
        target: The folder in the storage below which its files stand at the run's end.
        part: The last part that was stored.
        is_current: True if the folder was equal to that part when it was last scanned.
        failed: Why files could not be stored, by their names.
    """

    def __init__(
        self,
        storage: RunStorage,
        name: str,
        node: int,
        place_code: Callable[[Path], None],
        *,
        node_id: str = "",
        is_direct: bool = False,
        exclude: Sequence[str] = (),
        max_bytes: float = math.inf,
    ) -> None:
        self._storage = storage
        self._node = node
        self._place_code = place_code
        self._is_direct = is_direct
        self._max_bytes = max_bytes
        self.target = f"{layout.FILES_FOLDER}/{name}" if is_direct else layout.FILES_FOLDER
        self._root = Path(storage.path()) if is_direct else node_folder("runs", f"{storage.uri} {node_id}")
        self.folder = Path(storage.path(self.target)) if is_direct else self._root / "work" / name
        self._frozen = self._root / ".snapshot"  # on the same disk, for hard links
        patterns = from_options(exclude, "/", "--exclude")
        self._scanner = FolderScanner(self.folder, lambda name, is_folder: bool(patterns.decide(f"/{name}", is_folder)))
        self._base: Scan = {}
        self._snapshot = Snapshot()
        self._restored: Scan = {}
        self.begin(1)

    def reset(self) -> None:
        """Make the folder the user's code and the files of the last snapshot, before any script of the node starts.

        Raises:
            OSError: A file can't be read from the storage, or not be written here.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        if not self._is_direct:
            node_cache.make_room(ROOM_BYTES)
            node_cache.hold(self._root)
        snapshot = read_snapshot(self._storage)
        if self._is_direct:
            snapshot = self._out_of_place(snapshot)
        if self._node == 0:
            with suppress(OSError):  # the run's end deletes what is left
                delete_others(self._storage, snapshot)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for folder in self._earlier:  # a reset that was killed has left them
            shutil.rmtree(folder, ignore_errors=True)
        before = self.folder.with_name(f"{BEFORE}{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            self.folder.rename(before)
        self._place_code(self.folder)
        self._scanner.too_many.clear()
        self._base = self._scanner.scan()
        here = {name for name, kept in snapshot.files.items() if self._is_here(before / name, name, kept)}
        restore(self._storage, snapshot.files, self.folder, {name: before / name for name in here})
        shutil.rmtree(before, ignore_errors=True)
        self._snapshot, self._restored = snapshot, self._scanner.scan()
        self.begin(1)

    def _out_of_place(self, snapshot: Snapshot) -> Snapshot:
        """Store as versions the files that a snapshot has in this folder, which is about to be recreated."""
        files = dict(snapshot.files)
        for name, kept in snapshot.files.items():
            if kept.key.startswith(f"{self.target}/"):
                key = key_of(f"{layout.VERSIONS_FOLDER}/0-0-{self._lease}", name)
                state = state_of(self._storage.path(kept.key))
                if state is None or state.link is not None:  # the user has deleted it
                    del files[name]
                    continue
                copy_on_disk(Path(self._storage.path(kept.key)), Path(self._storage.path(key)))
                files[name] = replace(kept, key=key, size=state.size, written_at=state.written_at)
        moved = Snapshot(files, snapshot.left_out, self.target)
        if moved != snapshot:
            write_snapshot(self._storage, moved)
        return moved

    def _is_here(self, path: Path, name: str, kept: KeptFile) -> bool:
        """Return whether a file of a snapshot is still as it was stored."""
        is_same = self.part.files.get(name) == kept and not kept.is_log and kept.link is None
        return is_same and (state := state_of(path)) is not None and state == self.part.states.get(name)

    def ignore_new(self) -> None:
        """Count files that have appeared since the reset as code, which is not kept."""
        found = self._scanner.scan()
        self._base |= {name: state for name, state in found.items() if name not in self._restored}

    @property
    def outside(self) -> list[str]:
        """Relative paths of files that the script has made next to the folder: they are not kept."""
        with suppress(OSError):
            beside = {*self.folder.parent.iterdir()} - {self.folder, *self._earlier}
            return sorted(f"../{path.name}" for path in beside)
        return []

    @property
    def _earlier(self) -> list[Path]:
        return [*self.folder.parent.glob(f"{BEFORE}*")]

    def remove(self) -> None:
        """Delete the folder, unless it is in the storage."""
        if not self._is_direct:
            shutil.rmtree(self._root, ignore_errors=True)

    def begin(self, nodes: int) -> None:
        """Take what the reset has restored as stored. A node that is gone leaves its files to another one.

        Args:
            nodes: The number of nodes.
        """
        snapshot, found = self._snapshot, self._restored
        owned = {name: kept for name, kept in snapshot.files.items() if kept.node % nodes == self._node}
        self.part = Part(0, owned, {name: found[name] for name in owned if name in found}, snapshot.left_out)
        self._of_others = {n: found[n] for n in snapshot.files.keys() - owned.keys() if n in found}
        self._committed = snapshot.keys
        self._lease = uuid.uuid4().hex[:8]
        self.is_current = True
        self.failed: dict[str, str] = {}
        self._last: Scan = found
        self._data: Scan = {}
        self._quiet_since = self._next_scan_at = self._logs_stored_at = 0.0
        self._stored_at = time.monotonic()
        self._changing_since: dict[str, float] = {}
        self._held_since: dict[str, float] = {}
        self._changed_at: dict[str, float] = {}  # of files that are logs by their names

    def poll(self, writers: Iterable[psutil.Process] = (), *, at_once: bool = False) -> bool:
        """Look at the folder, and store a part once it is quiet; return False if it is too early for another look.

        Args:
            writers: The script's processes.
            at_once: True to scan the folder now, because the others wait for the answer.

        Raises:
            OSError: The storage can't be written; the next call tries again.
        """
        now = time.monotonic()
        if now < self._next_scan_at and not at_once:
            return False
        found, writers = self._changed(), list(writers)
        logs, busy = self._logs(found, open_for_writing(self.folder, writers), now)
        self._next_scan_at = now + max(SCAN_SECONDS, SCAN_SHARE * (time.monotonic() - now))
        data = {name: state for name, state in found.items() if name not in logs}
        if data != self._data or busy:
            self._data, self._quiet_since = data, now
        self.is_current = not busy and self._is_stored(data, logs)
        if self.is_current:
            self._stored_at = now
        is_overdue = now - self._stored_at >= OVERDUE_SECONDS
        if not self.is_current and not busy and now - self._quiet_since >= QUIET_SECONDS:
            self.is_current = self._store(found, logs)
        elif not self.is_current and is_overdue and (moment := self._moment(writers, logs)) is not None:
            self.is_current = self._store(moment, logs)
            if self.is_current:
                self._stored_at = time.monotonic()
        elif now - self._logs_stored_at >= LOG_SECONDS:
            self._store_logs(found, logs, now)
        return True

    def _moment(self, writers: Iterable[psutil.Process], logs: set[str]) -> Scan | None:
        """Return the files at a moment when none is open for writing, in a short pause if there is one, or None."""
        before: Scan | None = None
        for look in range(LOOKS):
            time.sleep(LOOK_SECONDS)
            found = self._changed()
            busy = (open_for_writing(self.folder, writers).keys() & found.keys()) - logs
            data = {name: state for name, state in found.items() if name not in logs}
            if not busy and (data == before or look == LOOKS - 1):
                time.sleep(LOOK_SECONDS)  # a process that is killed closes its files before it has ended
                return found if all(map(_runs, writers)) else None
            before = data
        return None

    def finish(self) -> None:
        """Store the last part: the script has ended, so that every file is complete.

        Raises:
            OSError: The storage can't be written.
        """
        found = self._changed()
        states = {name: state for name, state in self.part.states.items() if name not in self.failed}
        self.part = replace(self.part, states=states)
        self.is_current = self._is_stored(found, set()) or self._store(found, set())
        if not self.is_current:
            raise OSError("files still change after the script has ended")

    def commits(self, keys: Set[str]) -> None:
        """Take note of the objects of a snapshot that is about to be written: it may be, even if that seems to fail."""
        self._committed |= keys

    def committed(self, keys: Set[str]) -> set[str]:
        """Take note of the objects of the last snapshot; return the ones that are no longer needed."""
        in_use = keys | self._keys
        old, self._committed = self._committed, set(keys)
        return old - in_use

    @property
    def _keys(self) -> set[str]:
        return {kept.key for kept in self.part.files.values()}

    def _changed(self) -> Scan:
        """Return the files that this node keeps: the ones that its script has created or changed."""
        found = self._scanner.scan()
        return {n: s for n, s in found.items() if self._base.get(n) != s and self._of_others.get(n) != s}

    def _is_stored(self, data: Scan, logs: set[str]) -> bool:
        stored = {name: state for name, state in self.part.states.items() if name not in logs}
        return data == stored and logs <= self.part.states.keys()

    def _logs(self, found: Scan, held: Mapping[str, bool], now: float) -> tuple[set[str], set[str]]:
        """Return the files that are written until the run ends, and the files that hold up a part."""
        changing = {name for name, state in found.items() if self._last.get(name, state) != state}
        self._last = found
        self._changing_since = {name: self._changing_since.get(name, now) for name in changing}
        self._held_since = {name: self._held_since.get(name, now) for name in held}
        self._changed_at |= dict.fromkeys(filter(grows, changing), now)
        growing = {name for name, at in self._changed_at.items() if now - at < LOG_SECONDS}
        restless = {name for name, since in self._changing_since.items() if now - since >= RESTLESS_SECONDS}
        long_held = {name for name, since in self._held_since.items() if now - since >= HELD_SECONDS}
        appended = {name for name, is_appended in held.items() if is_appended or grows(name)}
        logs = (appended | growing | long_held | (restless - held.keys())) & found.keys()
        return logs, (held.keys() & found.keys()) - logs

    def _store(self, found: Scan, logs: set[str]) -> bool:
        """Store a part; return False if a file has changed meanwhile."""
        kept, left_out = fitting(found, self._max_bytes, MAX_FILES)
        number = self.part.number + 1
        links = {n: KeptFile(link=found[n].link, node=self._node) for n in kept if found[n].link is not None}
        old = {n: k for n, k in self.part.files.items() if n in kept - logs and self.part.states.get(n) == found[n]}
        new = kept - links.keys() - old.keys()
        with self._freeze(found, new) as copies:
            if not _are_as(found, {name: self.folder / name for name in new - logs}):
                return False
            stored, failed = self._upload_all(copies, found, logs, number)
            shared = {n: copies[n] for n in new - logs if found[n].size > COPIED_BYTES or copies[n] == self.folder / n}
            if not _are_as(found, shared):  # rewritten in place while they were read
                return False
        self.failed = failed
        too_many = [f"{folder} (more than {MAX_ENTRIES:,} entries)" for folder in sorted(self._scanner.too_many)]
        unreadable = [f"{folder} (no permission to read it)" for folder in sorted(self._scanner.unreadable)]
        self.part = Part(number, {**old, **links, **stored}, found, (*too_many, *unreadable, *left_out))
        return True

    @contextmanager
    def _freeze(self, found: Scan, names: Set[str]) -> Generator[dict[str, Path]]:
        """Yield a copy of each file; of a large one a hard link, which stays when the script replaces the file.

        A small one, such as a status file, may be rewritten in place while the others are uploaded.
        """
        shutil.rmtree(self._frozen, ignore_errors=True)
        self._frozen.mkdir(parents=True)
        copies: dict[str, Path] = {}
        try:
            for number, name in enumerate(names):
                copies[name] = self._frozen / str(number)
                try:
                    copy = shutil.copyfile if found[name].size <= COPIED_BYTES else os.link
                    copy(self.folder / name, copies[name])
                except OSError:  # the script has just deleted it, or the disk does not support hard links
                    copies[name] = self.folder / name
            yield copies
        finally:
            shutil.rmtree(self._frozen, ignore_errors=True)

    def _upload_all(
        self, copies: Mapping[str, Path], states: Scan, logs: set[str], number: int
    ) -> tuple[dict[str, KeptFile], dict[str, str]]:
        """Upload files; return the stored ones, and the reasons why others could not be stored.

        Raises:
            OSError: The storage can't be written at all.
        """
        stored: dict[str, KeptFile] = {}
        failed: dict[str, str] = {}

        def upload(name: str) -> None:
            try:
                stored[name] = self._upload(name, copies[name], states[name], name in logs, number)
            except Exception as cause:  # a fault of one file must not hold up the others
                failed[name] = one_line(cause)

        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
            list(threads.map(upload, copies))
        if failed:
            # This raises where the storage is at fault.
            self._storage.write(f"{layout.PARTS_FOLDER}/{self._node}.probe", b"")
            again, failed = list(failed), {}
            for name in again:
                upload(name)
        return stored, failed

    def _upload(self, name: str, copy: Path, state: FileState, is_log: bool, number: int) -> KeptFile:
        key = self._key(name, is_log, number)
        size = 0
        with copy.open("rb") as source, self._storage.replace(key) as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                size += len(chunk)
        return KeptFile(key, size, state.written_at, state.mode, is_log=is_log, node=self._node)

    def _key(self, name: str, is_log: bool, number: int) -> str:
        """Return where a file is stored: in S3 in its place, unless that is another node's or the last snapshot's."""
        known = self.part.files.get(name)
        if is_log and known and known.is_log:
            return known.key
        key = key_of(self.target, name)
        # On a disk, a folder may be where a file was, or the other way round.
        is_free = self._node == 0 and not self._storage.is_local and key not in self._committed | self._keys
        return key if is_free else key_of(f"{layout.VERSIONS_FOLDER}/{self._node}-{number}-{self._lease}", name)

    def _store_logs(self, found: Scan, logs: set[str], now: float) -> None:
        """Store the logs that have grown, each in its place."""
        self._logs_stored_at = now
        known = {name: self.part.files[name] for name in logs & self.part.files.keys()}
        grown = {n: self.folder / n for n, kept in known.items() if kept.is_log and self.part.states.get(n) != found[n]}
        if grown:
            stored, _ = self._upload_all(grown, found, logs, self.part.number)
            files = {**self.part.files, **stored}
            states = {**self.part.states, **{name: found[name] for name in stored}}
            self.part = replace(self.part, files=files, states=states)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _are_as(states: Scan, paths: Mapping[str, Path]) -> bool:
    return all(state_of(path) == states[name] for name, path in paths.items())
