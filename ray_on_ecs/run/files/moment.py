"""The moment at which the folders of all nodes were at their stored parts: the parts of then are one snapshot.

The driver counts its polls. A node that was in a state when the driver heard of it, and still was in a look that began
after it had got a later poll, was in that state when that poll was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_on_ecs.run.group import FilesStatus


@dataclass(frozen=True)
class Stay:
    """A part at which a node's folder has been."""

    part: str
    begin: int  # the first poll that was sent when the folder was at it
    end: int  # the last poll that arrived before the node's last look at the folder when it still was


class Moments:
    """The driver's view of the nodes' folders during one start of the scripts."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, int]] = {}
        self._stays: dict[int, Stay] = {}
        self._are_waiting: dict[int, bool] = {}

    def hear(self, node: int, files: FilesStatus, next_poll: int) -> None:
        """Take the status of a node's files; `next_poll` is the number of the poll that is sent next."""
        if node not in self._states or self._states[node][0] != files.state:
            self._states[node] = (files.state, next_poll)
        stay = self._stays.get(node)
        if files.state == files.part_state:  # the folder is at its part
            self._stays[node] = Stay(files.part, self._states[node][1], files.checked)
        elif stay is None or stay.part != files.part:  # it has been, and the driver did not hear of it in time
            self._stays[node] = Stay(files.part, next_poll, files.checked)
        self._are_waiting[node] = files.state == files.part_state

    def common(self, nodes: int) -> Mapping[int, str]:
        """Return the newest parts of all nodes if there was a moment when all were at them, else nothing."""
        stays = self._stays
        if len(stays) < nodes or max(stay.begin for stay in stays.values()) > min(stay.end for stay in stays.values()):
            return {}
        return {node: stay.part for node, stay in sorted(stays.items())}

    def needs_look(self, nodes: int) -> bool:
        """Return whether all nodes are at parts, and only their next looks can tell if that was at the same time."""
        return len(self._stays) == nodes and all(self._are_waiting.values()) and not self.common(nodes)
