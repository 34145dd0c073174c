"""A run's folder on one node: it begins with the user's code, and what the script changes in it is soon in the storage.

A part is the folder at one moment: it is stored when nothing has changed for some time and nothing is open for writing.
Logs are in it as they were then. The parts of all nodes are a snapshot (run/files/node_files.py), from which a restart
begins.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ray_on_ecs.errors import DISK_FULL, counted, one_line
from ray_on_ecs.private_folder import node_folder
from ray_on_ecs.run.code.ignore import Patterns
from ray_on_ecs.run.files import known
from ray_on_ecs.run.files.frozen import Copy, Frozen, companions, copy_bytes, freeze, is_database, open_regular
from ray_on_ecs.run.files.outside import OutsideFiles
from ray_on_ecs.run.files.scan import (
    MAX_ENTRIES,
    TICK_SECONDS,
    FileState,
    FolderActivity,
    FolderScanner,
    Looks,
    Scan,
    is_running,
    open_for_writing,
    select_within_limits,
    state_of,
    without_logs,
)
from ray_on_ecs.storage import layout, node_cache
from ray_on_ecs.storage.disk import StoredFile
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import (
    KeptFile,
    Snapshot,
    delete_others,
    key_of,
    read_snapshot,
    restore,
    write_snapshot,
)

logger = logging.getLogger(__name__)

# The folder is asked this often if it is time for a scan.
POLL_SECONDS = 0.5
SCAN_SECONDS = QUIET_SECONDS = 2.0
# After this time without such a pause, scans in quick succession find a short one.
OVERDUE_SECONDS, LOOK_SECONDS, LOOKS = 15.0, 0.2, 10
# Logs that have grown while nothing else has changed are stored this often.
LOG_SECONDS = 10.0
# A process that is killed closes its files before it has ended, by less than this.
CLOSING_SECONDS = 0.05
MAX_FILES = 20_000
UPLOADS_AT_ONCE = 8
# Prefix of the old folder's name while a reset puts a new one in its place.
BEFORE = ".before-"
ROOM_BYTES = 2 * 2**30


@dataclass(frozen=True)
class SnapshotPart(Snapshot):
    """One node's part of a snapshot: the stored state of its folder.

    Attributes:
        number: Counts the parts of a node since the folder was reset.
        states: The states of the files on the node's disk, also of files that are not stored.
    """

    number: int = 0
    states: Mapping[str, FileState] = field(default_factory=dict)


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
        variables: The script's environment variables.

    Attributes:
        folder: The working directory of the script.
        target: The folder in the storage below which its files stand at the run's end.
        part: The last part that was stored.
        is_current: True if the folder was equal to that part when it was last scanned.
        state: The number of the folder's state at the last scan; it grows whenever the files change.
        failed: The reasons why files could not be stored, by their names.
        looks: The times of the looks at the files and their writers.
        rested_at: The last time (Unix time) at which no file was seen open for writing.
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
        variables: Mapping[str, str] | None = None,
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
        own = [self._root, *([Path(storage.path())] if storage.is_local else [])]
        self._outside = OutsideFiles(own, variables or {})
        patterns = Patterns(exclude)
        self._scanner = FolderScanner(self.folder, lambda name, is_folder: bool(patterns.decide(name, is_folder)))
        self._base: Scan = {}
        self._snapshot = Snapshot()
        self._restored: Scan = {}
        self.looks = Looks()
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
            snapshot = self._copy_to_versions(snapshot)
        if self._node == 0:
            with suppress(OSError):  # the run's end deletes what is left
                delete_others(self._storage, snapshot)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for folder in self._old_folders():  # a reset that was killed has left them
            shutil.rmtree(folder, ignore_errors=True)
        old_folder = self.folder.with_name(f"{BEFORE}{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            self.folder.rename(old_folder)
        self._place_code(self.folder)
        self._scanner.too_many.clear()
        self._base = self._scanner.scan()
        on_disk: dict[str, Path] = {}
        for name, (file, state) in (self._known() or known.read(self._root)).items():
            path = old_folder / name
            is_wanted = snapshot.files.get(name) == file and file.link is None
            # With --local the last files of a start may be links to the snapshot's, which the next must not write.
            if is_wanted and state_of(path) == state and not (self._is_direct and path.lstat().st_nlink > 1):
                on_disk[name] = path
        left_out = [*snapshot.refused, *restore(self._storage, snapshot.files, self.folder, on_disk)]
        if left_out:
            logger.info(f"not restored, as they can't be files here: {', '.join(map(repr, left_out))}")
        shutil.rmtree(old_folder, ignore_errors=True)
        self._snapshot, self._restored = snapshot, self._scanner.scan()
        logger.debug(f"reset {self.folder} to {counted(len(snapshot.files), 'stored file')}")
        self.begin(1)

    def _copy_to_versions(self, snapshot: Snapshot) -> Snapshot:
        """Store as versions the files that a snapshot has in this folder, which is about to be recreated."""
        files = dict(snapshot.files)
        for name, file in snapshot.files.items():
            if not file.key.startswith(f"{self.target}/"):
                continue
            state = state_of(self._storage.path(file.key))
            if state is None or state.link is not None:  # the user has deleted it
                del files[name]
                continue
            key = key_of(f"{layout.VERSIONS_FOLDER}/0-0-{self._lease}", name)
            self._storage.store.copy(StoredFile(self._storage.path(file.key), file.size), self._storage.path(key))
            files[name] = replace(file, key=key, size=state.size, written_at=state.written_at)
        copied = Snapshot(files, snapshot.left_out, self.target)
        if copied != snapshot:
            write_snapshot(self._storage, copied)
        return copied

    def _known(self) -> dict[str, tuple[KeptFile, FileState]]:
        """Return the files of this disk that are stored as they are, with their states."""
        found: dict[str, tuple[KeptFile, FileState]] = {}
        for files, states in ((self._snapshot.files, self._restored), (self.part.files, self.part.states)):
            found |= {name: (file, states[name]) for name, file in files.items() if name in states and not file.is_log}
        return found

    def keep(self) -> None:
        """Leave the folder to another process on this node, whose reset restores only what differs."""
        if not self._is_direct:
            known.write(self._root, self._known())

    def ignore_new(self) -> None:
        """Count files that have appeared since the reset as code, which is not kept."""
        for name, state in self._scanner.scan().items():
            if name not in self._restored:
                self._base[name] = state

    def find_outside(self) -> list[str]:
        """Return what the script has written next to the folder, and large files elsewhere: they are not kept."""
        beside: list[str] = []
        with suppress(OSError):
            paths = {*self.folder.parent.iterdir()} - {self.folder, *self._old_folders()}
            beside = sorted(f"../{path.name}" for path in paths)
        return [*beside, *self._outside.find()]

    def _old_folders(self) -> list[Path]:
        return list(self.folder.parent.glob(f"{BEFORE}*"))

    def remove(self) -> None:
        """Delete the folder, unless it is in the storage."""
        if not self._is_direct:
            shutil.rmtree(self._root, ignore_errors=True)

    def begin(self, nodes: int) -> None:
        """Take what the reset has restored as stored. The files of a node that was lost pass to another one."""
        snapshot, restored = self._snapshot, self._restored
        owned = {name: file for name, file in snapshot.files.items() if file.node % nodes == self._node}
        states = {name: restored[name] for name in owned if name in restored}
        self.part = SnapshotPart(owned, snapshot.left_out, states=states)
        self._of_others = {n: restored[n] for n in snapshot.files.keys() - owned.keys() if n in restored}
        self._committed = snapshot.keys
        self._lease = uuid.uuid4().hex[:8]
        self.is_current = True
        self.state = 0
        self.failed: dict[str, str] = {}
        self._activity = FolderActivity(restored)
        self._next_scan_at = self._logs_stored_at = self.rested_at = 0.0
        self._stored_at = time.monotonic()

    def poll(self, writers: Iterable[psutil.Process] = (), *, at_once: bool = False) -> bool:
        """Look at the folder, and store a part once it is quiet; return False if it is too early for another look.

        Args:
            writers: The script's processes.
            at_once: True to scan the folder now: the others wait for the answer.

        Raises:
            OSError: The storage can't be written; the next call tries again.
        """
        now = time.monotonic()
        writers = list(writers)
        if now < self._next_scan_at and not at_once:
            if not self.is_current:
                self._open_files(writers)
            return False
        files = self._changed_files()
        activity = self._activity
        quiet_since = activity.quiet_since
        open_files = self._open_files(writers)
        databases = {name for name in open_files if is_database(self.folder / name)}
        activity.update(files, open_files, now, databases | companions(databases))
        self.state += activity.quiet_since != quiet_since
        self._next_scan_at = now + SCAN_SECONDS
        self.is_current = not activity.busy and self._is_stored(activity.data, activity.logs)
        if self.is_current:
            self._stored_at = now
            are_due = now - self._logs_stored_at >= LOG_SECONDS
            if are_due and any(self.part.states[name] != files[name] for name in activity.logs):
                self.state += 1  # the other nodes may have changed since the last part
                self.is_current = self._store(files, activity.logs)
        elif not activity.busy and now - activity.quiet_since >= QUIET_SECONDS:
            self.is_current = self._store(files, activity.logs)
        elif now - self._stored_at >= OVERDUE_SECONDS:
            files_in_pause = self._find_pause(writers, activity.logs)
            if files_in_pause is not None:
                self.state += 1
                activity.data = without_logs(files_in_pause, activity.logs)  # the next scan compares with it
                self.is_current = self._store(files_in_pause, activity.logs)
                if self.is_current:
                    self._stored_at = time.monotonic()
        return True

    def _open_files(self, writers: Sequence[psutil.Process]) -> dict[str, bool]:
        """Return the files that are open for writing, and take note of the time if the folder is at rest."""
        now = time.time()
        open_files = self._open_for_writing(writers)
        if writers and self._is_at_rest(open_files):
            time.sleep(CLOSING_SECONDS)
            if all(map(is_running, writers)):
                self.rested_at = now
        return open_files

    def _open_for_writing(self, writers: Iterable[psutil.Process]) -> dict[str, bool]:
        with self.looks.measured():
            return open_for_writing(self.folder, writers, self._outside.see)

    def _is_at_rest(self, open_files: Mapping[str, bool]) -> bool:
        """Return whether only such files are open for writing as are until the run ends."""
        others = {name for name, is_appended in open_files.items() if not is_appended} - self._activity.held
        return all(map(self._scanner.skips, others))

    def is_at_rest(self, writers: Iterable[psutil.Process]) -> bool:
        """Return whether a kill of these processes would leave no file half-written."""
        return self._is_at_rest(self._open_for_writing(writers))

    def _find_pause(self, writers: Iterable[psutil.Process], logs: set[str]) -> Scan | None:
        """Return the files at a moment when none is open for writing, in a short pause if there is one, or None."""
        previous: Scan | None = None
        for look in range(LOOKS):
            time.sleep(LOOK_SECONDS)
            files = self._changed_files()
            busy = (self._open_for_writing(writers).keys() & files.keys()) - logs
            data = without_logs(files, logs)
            if not busy and (data == previous or look == LOOKS - 1):
                time.sleep(LOOK_SECONDS)  # a process that is killed closes its files before it has ended
                return files if all(map(is_running, writers)) else None
            previous = data
        return None

    def changed_since(self, rested_at: float | None) -> list[str]:
        """Return the files that a kill may have left half-written, as they have changed since a rest; the newest first.

        `rested_at` is a time (Unix time) at which it was, if `self.rested_at` is not later; None if it never was.
        """
        since = -math.inf if rested_at is None else (max(rested_at, self.rested_at) - TICK_SECONDS) * 1e9
        files = without_logs(self._changed_files(), self._activity.held)
        changed = [name for name, each in files.items() if each.written_at >= since]
        return sorted(changed, key=lambda name: (-files[name].written_at, name))

    def finish(self) -> None:
        """Store the last part: the script has ended, so that every file is complete.

        Raises:
            OSError: The storage can't be written.
        """
        files = self._changed_files()
        states = {name: state for name, state in self.part.states.items() if name not in self.failed}
        self.part = replace(self.part, states=states)
        self.is_current = self._is_stored(files, set()) or self._store(files, set(), has_ended=True)
        if not self.is_current:
            raise OSError("files still change after the script has ended")

    @property
    def part_name(self) -> str:
        """The name of the last part, `NODE-NUMBER-LEASE`, which no other part of the run has."""
        return f"{self._node}-{self.part.number}-{self._lease}"

    def before_commit(self, keys: Set[str]) -> None:
        """Protect the objects of a snapshot that is about to be written: it may be, even if that seems to fail."""
        self._committed |= keys

    def after_commit(self, keys: Set[str]) -> set[str]:
        """Take note of the objects of the last snapshot; return the ones that are no longer needed."""
        earlier, self._committed = self._committed, set(keys)
        return earlier - keys - self.part.keys

    def _changed_files(self) -> Scan:
        """Return the files that this node keeps: the ones that its script has created or changed."""
        base, of_others = self._base, self._of_others
        with self.looks.measured():
            found = self._scanner.scan()
        return {name: state for name, state in found.items() if state not in (base.get(name), of_others.get(name))}

    def _is_stored(self, data: Scan, logs: Set[str]) -> bool:
        return data == without_logs(self.part.states, logs) and logs <= self.part.states.keys()

    def _store(self, files: Scan, logs: Set[str], *, has_ended: bool = False) -> bool:
        """Store a part; return False if a file that is not a log has changed meanwhile."""
        names, left_out = select_within_limits(files, self._max_bytes, MAX_FILES)
        # A backup of a database is complete without the files beside it.
        databases = {name for name in logs if is_database(self.folder / name)}
        names -= companions(databases)
        number = self.part.number + 1
        kept: dict[str, KeptFile] = {}
        for name in names:
            if files[name].link is not None:
                kept[name] = KeptFile(link=files[name].link, node=self._node)
            elif name in self.part.files and all(
                self.part.states.get(each) == files.get(each) for each in (name, *companions([name]))
            ):
                kept[name] = replace(self.part.files[name], is_log=name in logs)
        with freeze(self.folder, self._frozen, files, names - kept.keys(), logs, has_ended=has_ended) as frozen:
            if without_logs(self._changed_files(), logs) != without_logs(files, logs):
                return False
            copies = frozen.copies
            stored, failed = self._upload_all(frozen, logs, number, has_ended)
            # A hard link, or the file itself, may have been rewritten in place while it was read.
            if any(copy.is_shared and state_of(copy.path) != copy.state for copy in copies.values()):
                return False
        kept |= {name: self.part.files[name] for name in failed.keys() & logs & self.part.files.keys()}  # as it was
        self.failed = failed
        self._logs_stored_at = time.monotonic()
        too_many = [f"{folder} (more than {MAX_ENTRIES:,} entries)" for folder in sorted(self._scanner.too_many)]
        unreadable = [f"{folder} (no permission to read it)" for folder in sorted(self._scanner.unreadable)]
        left_out = [*too_many, *unreadable, *left_out]
        states = {**files, **{name: copy.state for name, copy in copies.items()}}
        self.part = SnapshotPart({**kept, **stored}, tuple(left_out), number=number, states=states)
        return True

    def _upload_all(
        self, frozen: Frozen, logs: Set[str], number: int, has_ended: bool
    ) -> tuple[dict[str, KeptFile], dict[str, str]]:
        """Upload copies; return the stored ones, and the reasons why others could not be stored.

        Raises:
            OSError: The storage can't be written at all, or its disk is full: the others may name the missing ones.
        """
        stored: dict[str, KeptFile] = {}
        failed: dict[str, str] = {}

        def upload(name: str) -> None:
            try:
                stored[name] = self._upload(name, frozen.copies[name], name in logs, number, has_ended)
            except Exception as cause:  # a fault of one file must not hold up the others
                if isinstance(cause, OSError) and cause.errno in DISK_FULL:
                    raise
                failed[name] = one_line(cause)

        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
            list(threads.map(upload, frozen.copies))
        if failed:
            # This raises where the storage is at fault.
            self._storage.write(f"{layout.PARTS_FOLDER}/{self._node}.probe", b"")
            to_retry = list(failed)
            failed.clear()
            for name in to_retry:
                upload(name)
        return stored, {**frozen.failed, **failed}

    def _upload(self, name: str, copy: Copy, is_log: bool, number: int, has_ended: bool) -> KeptFile:
        key, state = self._key(name, number), copy.state
        if self._is_direct and has_ended:
            self._storage.store.copy(StoredFile(str(copy.path), copy.size), self._storage.path(key))  # a link
        else:
            with open_regular(copy.path) as source, self._storage.open_writer(key) as target:
                if copy_bytes(source, target, copy.size) < copy.size:
                    raise OSError("it has become shorter while it was read")
        return KeptFile(key, copy.size, state.written_at, state.mode, is_log=is_log, node=self._node)

    def _key(self, name: str, number: int) -> str:
        """Return the key of a file: in S3 its final one, unless another node or the last snapshot may have that."""
        final_key = key_of(self.target, name)
        # On a disk, a folder may be where a file was, or the other way round.
        if self._node == 0 and not self._storage.is_local and final_key not in self._committed | self.part.keys:
            return final_key
        return key_of(f"{layout.VERSIONS_FOLDER}/{self._node}-{number}-{self._lease}", name)
