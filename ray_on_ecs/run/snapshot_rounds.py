"""Snapshots of a run on several nodes: one is complete if all nodes were at their stored parts at the same time.

Each node tells which part its folder is at. When all do, node 0 proposes these parts, and a node confirms if its folder
is as in its part when it looks again: so all nodes were at their parts when node 0 proposed them.

A script may continue before that. So each node also reports which parts of the others it knew before it stored its last
one. If the others still are at these, node 0 proposes all of them, and that node need not confirm: all nodes were at
their parts when it stored its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from ray_on_ecs.run.group import FilesStatus
from ray_on_ecs.run.run_folder import Part, RunFolder
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.snapshot import KeptFile, Snapshot, delete_keys, read_snapshot, write_snapshot
from ray_on_ecs.tracking.storage import RunStorage

NAMES_SHOWN = 3
# In place of a part's number, because the node's files change; and of a node.
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
    own: Part


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
        self._proposed: Proposal | None = None
        self._seen_part = 0
        self._basis: Mapping[int, int] = {}
        self._has_told = False
        self.status = FilesStatus(part=0)

    def poll(self, statuses: Mapping[int, FilesStatus], writers: Iterable[psutil.Process] = ()) -> None:
        """Look at the folder, store a part of it once it is quiet, and on node 0 a snapshot once all nodes agree.

        Args:
            statuses: The statuses of the nodes, by their ranks.
            writers: The script's processes on this node.

        Raises:
            OSError: The storage can't be read or written; the next call tries again.
        """
        if self._folder.poll(writers, at_once=self._is_asked(statuses)):
            self._update(statuses)

    def _is_asked(self, statuses: Mapping[int, FilesStatus]) -> bool:
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
        """Tell how the folder is; on node 0 look at the proposal.

        Args:
            statuses: The statuses of the nodes from before this node scanned its folder.
        """
        part = self._folder.part.number
        if part != self._seen_part:  # it was stored in this look
            others = {node: status.part for node, status in statuses.items() if node != self._node}
            self._seen_part, self._basis = (
                part,
                {n: CHANGES if status is None else status for n, status in others.items()},
            )
        if part != self.status.stored:
            self._store_part()
        here = part if self._folder.is_current else None
        self.status = replace(self.status, part=here, stored=part, basis=self._basis)
        if self._node == 0:
            self._lead({node: status for node, status in statuses.items() if node != 0})
        elif (leader := statuses.get(0)) and here is not None and leader.parts.get(self._node) == here:
            self.status = replace(self.status, confirmed=leader.proposal)

    def _lead(self, others: Mapping[int, FilesStatus]) -> None:
        told = {0: self.status, **others}
        if self._proposed and self._have_confirmed(others):
            self._commit(self._proposed.parts, self._proposed.own)
            self._proposed = None
        if self._proposed and self._is_over(self._proposed, told):
            self._proposed = None
        if self._proposed is None and len(told) == self._nodes and (found := self._find(told)):
            last, parts = found
            self._proposed = Proposal(parts, last, self._folder.part)
            self._folder.commits({kept.key for kept in self._folder.part.files.values()})
            self.status = replace(self.status, proposal=self.status.proposal + 1, parts=parts)
            if self._nodes == 1:
                self._commit(parts, self._folder.part)
                self._proposed = None

    def _find(self, told: Mapping[int, FilesStatus]) -> tuple[int, dict[int, int]] | None:
        """Return new parts of all nodes, and the node that need not confirm them, or NO_NODE."""
        for last, status in told.items():
            parts = {node: status.part for node, status in told.items() if node != last}
            belong = all(part is not None and status.basis.get(node, 0) == part for node, part in parts.items())
            found = {node: part for node, part in {**parts, last: status.stored}.items() if part is not None}
            if belong and found != self._committed:
                return last, found
        here = {node: status.part for node, status in told.items() if status.part is not None}
        return (NO_NODE, here) if len(here) == self._nodes and here != self._committed else None

    def _have_confirmed(self, others: Mapping[int, FilesStatus]) -> bool:
        """Return whether all nodes but the one that stored the last part have confirmed the proposal."""
        proposed = self._proposed
        if proposed is None or (proposed.last != 0 and self.status.part != proposed.parts[0]):
            return False
        asked = {node: status for node, status in others.items() if node != proposed.last}
        return all(e.part == proposed.parts[node] and e.confirms(self.status.proposal) for node, e in asked.items())

    @staticmethod
    def _is_over(proposed: Proposal, told: Mapping[int, FilesStatus]) -> bool:
        """Return whether a node has gone on before it could confirm."""
        return any(told[node].part != part for node, part in proposed.parts.items() if node != proposed.last)

    def _store_part(self) -> None:
        """Store the manifest of this node's part for node 0."""
        part = self._folder.part
        if self._node != 0:
            write_snapshot(self._storage, Snapshot(part.files, part.left_out), self._part_name(self._node, part.number))

    def _part_name(self, node: int, number: int) -> str:
        return f"{layout.PARTS_FOLDER}/{self._key}-{node}-{number}.json"

    def _commit(self, parts: Mapping[int, int], own: Part) -> None:
        """Write the manifest of a snapshot, and delete what it has made superfluous."""
        before = read_snapshot(self._storage)
        found = {node: self._read_part(before, node, number, own) for node, number in parts.items()}
        files = together([part.files for _, part in sorted(found.items())])
        left_out = [line for part in found.values() for line in part.left_out]
        snapshot = Snapshot(files, tuple(dict.fromkeys(left_out)), self._folder.target)
        self._folder.commits(snapshot.keys)
        write_snapshot(self._storage, snapshot)
        self._committed = dict(parts)
        self._tell_of_the_same({node: set(part.files) for node, part in found.items()})
        needed = {kept.key for part in found.values() for kept in part.files.values()}
        self._delete_old(needed, self._folder.committed(snapshot.keys), parts)

    def _read_part(self, before: Snapshot, node: int, number: int, own: Part) -> Snapshot:
        if node == 0:
            return Snapshot(own.files, own.left_out)
        if number == 0:  # as it was restored
            return Snapshot({name: kept for name, kept in before.files.items() if kept.node % self._nodes == node})
        return read_snapshot(self._storage, self._part_name(node, number))

    def _tell_of_the_same(self, names: Mapping[int, set[str]]) -> None:
        """Say once that several nodes write a file of the same name."""
        others = set().union(*(paths for node, paths in names.items() if node != 0))
        if (same := sorted(names[0] & others)) and not self._has_told:
            self._has_told = True
            shown = ", ".join(same[:NAMES_SHOWN]) + (", …" if len(same) > NAMES_SHOWN else "")
            print(f"several nodes write {shown}; those of the first node are kept", flush=True)

    def _delete_old(self, needed: set[str], old: set[str], parts: Mapping[int, int]) -> None:
        """Delete what earlier snapshots needed, and what was stored of parts that have others behind them.

        A file that is not in the snapshot, because another node has one of that name, is needed when that one goes.
        """
        with suppress(OSError):  # the end of the run deletes what is left
            for name in self._storage.files(layout.VERSIONS_FOLDER):
                found = re.match(r"(\d+)-(\d+)-", name)
                if found and int(found[2]) < parts.get(int(found[1]), 0):
                    old.add(f"{layout.VERSIONS_FOLDER}/{name}")
            delete_keys(self._storage, old - needed)


def together(parts: Sequence[Mapping[str, KeptFile]]) -> dict[str, KeptFile]:
    """Return the files of all nodes in one folder; where two can't both be, the one of the first of these nodes."""
    files: dict[str, KeptFile] = {}
    folders: set[str] = set()
    for part in parts:
        taken = files.keys() | folders
        new = {n: kept for n, kept in part.items() if n not in taken and not files.keys() & _folders(n)}
        files |= new
        folders = folders.union(*map(_folders, new))
    return files


def _folders(name: str) -> set[str]:
    return {name[:index] for index, letter in enumerate(name) if letter == "/"}
