"""Storage of a node's files, by its first worker: while the scripts run, and once they have ended.

Each node stores parts: states of its folder that are complete. The driver says which parts of all nodes were there at
the same time (run/files/moment.py), and node 0 writes them as a snapshot. A single node writes each part at once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from ray_on_ecs.errors import DISK_FULL, counted, one_line
from ray_on_ecs.names import folders_of
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.run.exchange import Exchange
from ray_on_ecs.run.files.folder import RunFolder
from ray_on_ecs.run.group import FilesStatus, Peer
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, delete_keys, read_snapshot, write_snapshot

logger = logging.getLogger(__name__)

NAMES_SHOWN = 3


class NodeFiles:
    """The files of a node's run folder during one start of the scripts, on their way to the storage.

    The folder has just been reset, and the exchange is that of the node's first worker.
    """

    def __init__(
        self, storage: RunStorage, folder: RunFolder, exchange: Exchange, peers: Sequence[Peer], node: int
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._exchange = exchange
        self._node = node
        self._nodes = len({peer.node_rank for peer in peers})
        folder.begin(self._nodes)
        self._stored = folder.part_name
        self._committed: Mapping[int, str] = {}
        self._left_out: tuple[str, ...] = ()
        self._has_warned = False
        self._outage = Outage("the storage of files", seconds=0)
        exchange.report(files=FilesStatus(part=folder.part_name))

    def store(self) -> None:
        """Store the files that are complete; called on another thread while the scripts run."""
        if self._was_killed:
            return
        before = self._folder.part_name, self._committed
        try:
            self._look()
            left_out = self._folder.part.left_out
            if left_out and left_out != self._left_out:
                logger.info(f"not kept: {', '.join(left_out)}; --keep-gib keeps more, --exclude keeps files out")
            self._left_out = left_out
            if before != (self._folder.part_name, self._committed):  # else nothing was stored
                self._outage.note(None, time.monotonic())
        except Exception as cause:  # the thread continues
            self._outage.note(self._why(cause), time.monotonic())

    def _look(self) -> None:
        """Look at the folder, and store a part of it once it is quiet.

        Raises:
            OSError: The storage can't be read or written; the next call tries again.
        """
        poll = self._exchange.poll_number  # that had arrived before the look
        if self._folder.looks.are_due:
            with self._folder.looks.measured():
                writers = writers_of(self._exchange.directive.pids.get(self._node, ()))
            if writers is None:  # a script has ended, and the driver will say if that was in the middle of a write
                return
            if self._folder.poll(writers, at_once=self._exchange.directive.scan):
                status = self._store_part()
                if self._folder.is_current:
                    status = replace(status, part_state=self._folder.state, checked=poll)
                self._exchange.report(files=replace(status, state=self._folder.state))
        self.commit()

    def store_last(self) -> None:
        """Store the last part of the node, if the driver has said that its scripts have ended and no file is torn.

        A worker that has lost the driver does not know this of the others.
        """
        if self._node not in self._exchange.directive.ended:
            return
        try:
            if self._was_killed:
                rested_at = self._exchange.directive.killed[self._node]
                dropped = self._folder.changed_since(rested_at)
                if rested_at is None or dropped:
                    self._exchange.report(dropped=next(iter(dropped), ""))
                    return
            self._folder.finish()
            self._exchange.report(files=replace(self._store_part(), is_last=True))
            self.commit()
        except Exception as cause:
            self._exchange.report(not_stored=self._why(cause))
            return
        if outside := self._folder.find_outside():
            way = "if the script has written it, let it write below $RUN_DIR, which is the working directory"
            logger.info(f"not kept, because it is outside the working directory: {', '.join(outside)}; {way}")
        if failed := self._folder.failed:
            self._exchange.report(not_stored="; ".join(f"{name}: {why}" for name, why in failed.items()))

    def commit_last(self) -> None:
        """Write the last snapshot of several nodes, once the driver wants it."""
        try:
            self.commit()
        except Exception as cause:
            self._exchange.report(not_stored=one_line(cause))

    def _why(self, cause: Exception) -> str:
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            disk = cause.filename or (self._storage.uri if self._storage.is_local else self._folder.folder)
            return f"the disk of {disk} is full"
        return one_line(cause)

    @property
    def _was_killed(self) -> bool:
        """True if a script of this node was killed, perhaps in the middle of a write."""
        return self._node in self._exchange.directive.killed

    def _store_part(self) -> FilesStatus:
        """Store the manifest of the node's part, if it is a new one; return the node's status with its number."""
        name = self._folder.part_name
        if name != self._stored:
            if self._nodes > 1 and self._node != 0:
                write_snapshot(self._storage, self._folder.part, _document(name))
            self._stored = name
        return replace(self._exchange.status.files or FilesStatus(), part=name)

    def commit(self) -> None:
        """Write a snapshot on node 0: of its part if it is the only node, otherwise of the parts that the driver names.

        Raises:
            OSError: The storage can't be read or written.
        """
        names = {0: self._stored} if self._nodes == 1 else self._exchange.directive.commit
        numbers = {node: _number(name) for node, name in names.items()}
        # Objects of an older part of this node may be overwritten by now.
        if names.get(0) != self._folder.part_name or names == self._committed or not any(numbers.values()):
            return
        previous = read_snapshot(self._storage)
        parts = {node: self._read_part(previous, node, name) for node, name in sorted(names.items())}
        left_out = [line for part in parts.values() for line in part.left_out]
        files = merge_parts([part.files for part in parts.values()])
        snapshot = Snapshot(files, tuple(dict.fromkeys(left_out)), self._folder.target)
        self._folder.before_commit(snapshot.keys)
        write_snapshot(self._storage, snapshot)
        self._committed = dict(names)
        self._exchange.report(files=replace(self._exchange.status.files or FilesStatus(), committed=self._committed))
        logger.debug(f"committed a snapshot of {counted(len(files), 'file')}, parts by node: {self._committed}")
        self._warn_of_same_names({node: set(part.files) for node, part in parts.items()})
        # A file that is not in the snapshot, because another node has one of its name, is needed once that one is lost.
        needed = set[str]().union(*(part.keys for part in parts.values()))
        self._delete_superseded(self._folder.after_commit(snapshot.keys), needed, numbers)

    def _read_part(self, previous: Snapshot, node: int, name: str) -> Snapshot:
        if node == 0:
            return self._folder.part
        if _number(name) == 0:  # as it was restored
            return Snapshot({path: file for path, file in previous.files.items() if file.node % self._nodes == node})
        return read_snapshot(self._storage, _document(name))

    def _warn_of_same_names(self, names: Mapping[int, set[str]]) -> None:
        """Print once that several nodes write a file of the same name."""
        others = set().union(*(paths for node, paths in names.items() if node != 0))
        same = sorted(names[0] & others)
        if same and not self._has_warned:
            self._has_warned = True
            shown = ", ".join(same[:NAMES_SHOWN]) + (", …" if len(same) > NAMES_SHOWN else "")
            logger.info(f"several nodes write {shown}; those of the first node are kept")

    def _delete_superseded(self, superseded: set[str], needed: set[str], numbers: Mapping[int, int]) -> None:
        """Delete the files that only earlier snapshots needed, and those of earlier parts."""
        with suppress(OSError):  # the end of the run deletes what is left
            for name in self._storage.files(layout.VERSIONS_FOLDER):
                version = re.match(r"(\d+)-(\d+)-", name)  # see RunFolder: NODE-NUMBER-
                if version and int(version[2]) < numbers.get(int(version[1]), 0):
                    superseded.add(f"{layout.VERSIONS_FOLDER}/{name}")
            delete_keys(self._storage, superseded - needed)


def _document(part: str) -> str:
    """Return the name of a part's manifest in the run's folder."""
    return f"{layout.PARTS_FOLDER}/{part}.json"


def _number(part: str) -> int:
    """Return the number of a part, by its name `NODE-NUMBER-LEASE`."""
    return int(part.split("-")[1])


def merge_parts(parts: Sequence[Mapping[str, KeptFile]]) -> dict[str, KeptFile]:
    """Return the files of all nodes in one folder; where two can't both be, the one of the first of these nodes."""
    files: dict[str, KeptFile] = {}
    folders: set[str] = set()
    for part in parts:
        taken = files.keys() | folders
        new: dict[str, KeptFile] = {}
        for name, file in part.items():
            if name not in taken and not files.keys() & folders_of(name):
                new[name] = file
        files |= new
        folders = folders.union(*map(folders_of, new))
    return files


def writers_of(pids: Iterable[int]) -> list[psutil.Process] | None:
    """Return the processes of the scripts whose supervisors these are; None if a script has ended."""
    writers: list[psutil.Process] = []
    for pid in pids:
        try:
            of_script = psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            return None
        if not of_script:
            return None
        writers += of_script
    return writers
