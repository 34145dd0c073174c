"""Snapshots of a run on several nodes: one is complete if all nodes were at their stored parts at the same time.

Each node reports the part that its folder is at. When all have one, node 0 proposes these parts, and a node confirms if
its folder is as in its part when it looks again: so all nodes were at their parts when node 0 proposed them.

A script may continue before that. So each node also reports which parts of the others it knew before it stored its last
one. If the others still are at these, node 0 proposes all of them, and that node need not confirm: all nodes were at
their parts when it stored its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from ray_on_ecs.errors import counted
from ray_on_ecs.names import folders_of
from ray_on_ecs.run.files.folder import RunFolder, SnapshotPart
from ray_on_ecs.run.group import FilesStatus
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, delete_keys, read_snapshot, write_snapshot

logger = logging.getLogger(__name__)

NAMES_SHOWN = 3
# In place of the number of a part whose files change, and of a node's rank.
CHANGES = NO_NODE = -1


@dataclass(frozen=True)
class Proposal:
    """A snapshot that node 0 has proposed.

    Attributes:
        parts: The numbers of the parts by node.
        last: The node that stored the last of them, which need not confirm, or NO_NODE.
        own: The part of node 0.
    """

    parts: Mapping[int, int]
    last: int
    own: SnapshotPart


class SnapshotRounds:
    """A node's view of the snapshots of its run.

    Args:
        storage: The run's folder in the storage.
        folder: The node's folder, which has just been reset.
        node: The node's rank.
        nodes: The number of nodes.
        key: Distinguishes the parts of these scripts from the parts of earlier ones.

    Attributes:
        status: The status that the node reports to the others.
    """

    def __init__(self, storage: RunStorage, folder: RunFolder, node: int, nodes: int, key: str = "") -> None:
        folder.begin(nodes)
        self._storage = storage
        self._folder = folder
        self._node = node
        self._nodes = nodes
        self._key = key
        self._committed = dict.fromkeys(range(nodes), 0)
        self._proposal: Proposal | None = None
        self._last_stored = 0
        self._basis: Mapping[int, int] = {}
        self._has_warned = False
        self.status = FilesStatus(part=0)

    def poll(self, statuses: Mapping[int, FilesStatus], writers: Iterable[psutil.Process] = ()) -> None:
        """Look at the folder, store a part of it once it is quiet, and on node 0 a snapshot once all nodes agree.

        Raises:
            OSError: The storage can't be read or written; the next call tries again.
        """
        if self._folder.poll(writers, at_once=self._is_awaited(statuses)):
            self._update(statuses)

    def _is_awaited(self, statuses: Mapping[int, FilesStatus]) -> bool:
        """Return whether the others wait for this node: node 0 for its confirmation, or they have given theirs."""
        if self._node == 0:
            return self._have_confirmed({node: status for node, status in statuses.items() if node != 0})
        leader = statuses.get(0, FilesStatus())
        return leader.proposal != self.status.confirmed and leader.parts.get(self._node) == self._folder.part.number

    def finish(self) -> None:
        """Store the node's last part.

        Raises:
            OSError: The storage can't be written.
        """
        self._folder.finish()
        self._store_part()
        number = self._folder.part.number
        self.status = replace(self.status, part=number, stored=number, is_last=True)

    def commit_last(self, statuses: Mapping[int, FilesStatus]) -> bool:
        """Store the last snapshot on node 0; return False while another node has not stored its last part.

        Raises:
            OSError: The storage can't be read or written.
        """
        last = {node: status.part for node, status in statuses.items() if status.is_last} | {0: self.status.part}
        parts = {node: part for node, part in last.items() if part is not None}
        if len(parts) < self._nodes:
            return False
        if parts != self._committed:
            self._commit(parts, self._folder.part)
        return True

    def _update(self, statuses: Mapping[int, FilesStatus]) -> None:
        """Report the folder's state; on node 0 look at the proposal.

        Args:
            statuses: The statuses of the nodes from before this node scanned its folder.
        """
        others = {node: status for node, status in statuses.items() if node != self._node}
        stored = self._folder.part.number
        if stored != self._last_stored:  # this look has stored it
            self._last_stored = stored
            self._basis = {node: CHANGES if status.part is None else status.part for node, status in others.items()}
        if stored != self.status.stored:
            self._store_part()
        part = stored if self._folder.is_current else None
        self.status = replace(self.status, part=part, stored=stored, basis=self._basis)
        if self._node == 0:
            self._lead(others)
            return
        leader = statuses.get(0)
        if leader and part is not None and leader.parts.get(self._node) == part:
            self.status = replace(self.status, confirmed=leader.proposal)

    def _lead(self, others: Mapping[int, FilesStatus]) -> None:
        """Commit the proposal if all have confirmed it, and propose the next snapshot."""
        statuses = {0: self.status, **others}
        if self._proposal and self._have_confirmed(others):
            self._commit(self._proposal.parts, self._proposal.own)
            self._proposal = None
        if self._proposal and self._has_failed(self._proposal, statuses):
            self._proposal = None
        if self._proposal or len(statuses) != self._nodes:
            return
        proposal = self._next_proposal(statuses)
        if proposal is None:
            return
        self._proposal = proposal
        self._folder.before_commit({file.key for file in proposal.own.files.values()})
        self.status = replace(self.status, proposal=self.status.proposal + 1, parts=proposal.parts)
        if self._nodes == 1:
            self._commit(proposal.parts, proposal.own)
            self._proposal = None

    def _next_proposal(self, statuses: Mapping[int, FilesStatus]) -> Proposal | None:
        """Return a proposal of new parts of all nodes, or None."""
        own = self._folder.part
        for last, last_status in statuses.items():
            parts = {node: status.part for node, status in statuses.items() if node != last}
            # The other nodes' parts have not changed since this node stored its part.
            is_consistent = all(
                part is not None and last_status.basis.get(node, 0) == part for node, part in parts.items()
            )
            proposed = {node: part for node, part in parts.items() if part is not None} | {last: last_status.stored}
            if is_consistent and proposed != self._committed:
                return Proposal(proposed, last, own)
        current = {node: status.part for node, status in statuses.items() if status.part is not None}
        if len(current) == self._nodes and current != self._committed:
            return Proposal(current, NO_NODE, own)
        return None

    def _have_confirmed(self, others: Mapping[int, FilesStatus]) -> bool:
        """Return whether all nodes but the one that stored the last part have confirmed the proposal."""
        proposal = self._proposal
        if proposal is None or (proposal.last != 0 and self.status.part != proposal.parts[0]):
            return False
        return all(
            status.part == proposal.parts[node] and status.confirms(self.status.proposal)
            for node, status in others.items()
            if node != proposal.last
        )

    @staticmethod
    def _has_failed(proposal: Proposal, statuses: Mapping[int, FilesStatus]) -> bool:
        """Return whether a node has gone on before it could confirm."""
        return any(statuses[node].part != part for node, part in proposal.parts.items() if node != proposal.last)

    def _store_part(self) -> None:
        """Store the manifest of this node's part for node 0."""
        part = self._folder.part
        if self._node != 0:
            write_snapshot(self._storage, Snapshot(part.files, part.left_out), self._part_name(self._node, part.number))

    def _part_name(self, node: int, number: int) -> str:
        return f"{layout.PARTS_FOLDER}/{self._key}-{node}-{number}.json"

    def _commit(self, numbers: Mapping[int, int], own: SnapshotPart) -> None:
        """Write the manifest of a snapshot, and delete what it has made superfluous."""
        previous = read_snapshot(self._storage)
        parts = {node: self._read_part(previous, node, number, own) for node, number in sorted(numbers.items())}
        left_out = [line for node in numbers for line in parts[node].left_out]
        files = merge_parts([part.files for part in parts.values()])
        snapshot = Snapshot(files, tuple(dict.fromkeys(left_out)), self._folder.target)
        self._folder.before_commit(snapshot.keys)
        write_snapshot(self._storage, snapshot)
        self._committed = dict(numbers)
        logger.debug(f"committed a snapshot of {counted(len(files), 'file')}, parts by node: {self._committed}")
        self._warn_of_same_names({node: set(part.files) for node, part in parts.items()})
        # A file that is not in the snapshot, because another node has one of its name, is needed once that one is lost.
        needed = {file.key for part in parts.values() for file in part.files.values()}
        self._delete_superseded(self._folder.after_commit(snapshot.keys), needed, numbers)

    def _read_part(self, previous: Snapshot, node: int, number: int, own: SnapshotPart) -> Snapshot:
        if node == 0:
            return Snapshot(own.files, own.left_out)
        if number == 0:  # as it was restored
            return Snapshot({name: file for name, file in previous.files.items() if file.node % self._nodes == node})
        return read_snapshot(self._storage, self._part_name(node, number))

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
