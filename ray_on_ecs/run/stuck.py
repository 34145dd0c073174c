"""The rank that the others wait for: one sentence from the stacks of all ranks, and the stacks by groups.

A rank that does not wait in a collective, while others do, is the odd one; else the ranks in a place where fewer are
than elsewhere are.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_on_ecs.run.collectives import Last
from ray_on_ecs.run.position import CHECKPOINTER, HAS, IS, IS_IN, WAITS, Position, position_of
from ray_on_ecs.run.stacks import ProcessStacks, Stacks, in_words

NO_PYTHON = "the script runs no Python process"
# Groups of a sentence after the first one, and ranks that are named.
MAX_GROUPS, MAX_NAMED = 4, 3
# A rank that gave a sign of life just now may be healthy.
SILENT_SECONDS = 5.0
# The last collective of a rank is known some seconds after it was joined.
SETTLED_SECONDS = 10.0


@dataclass(frozen=True)
class Group:
    """Ranks in the same place."""

    position: Position
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """The places and nodes of all ranks."""

    positions: Mapping[int, Position]
    nodes: Mapping[int, str]  # empty on one machine
    silent_seconds: float  # how long no rank has given a sign of life

    @property
    def groups(self) -> list[Group]:
        """The groups: those that wait, or the largest one, first, and the odd ones after them."""
        found: dict[tuple[object, ...], Group] = {}
        for rank, position in sorted(self.positions.items()):
            found.setdefault(position.key, Group(position)).ranks.append(rank)
        return sorted(
            found.values(),
            key=lambda group: (
                not group.position.is_known,
                not group.position.is_waiting,
                group.position.is_down,
                -len(group.ranks),
            ),
        )

    @property
    def odd(self) -> list[Group]:
        """The groups that the others wait for; empty if that is not known."""
        known = [group for group in self.groups if group.position.is_known]
        waiting = [group for group in known if group.position.is_waiting]
        up = [group for group in known if not group.position.is_down]
        for others in (waiting, up):
            if 0 < len(others) < len(known):
                return known[len(others) :]
        is_clear = len(known) > 1 and len(known[0].ranks) > len(known[1].ranks)
        return known[1:] if is_clear else []

    @property
    def odd_rank(self) -> int | None:
        """The one rank that the others wait for, or None."""
        ranks = [rank for group in self.odd for rank in group.ranks]
        return ranks[0] if len(ranks) == 1 else None

    def __str__(self) -> str:
        groups = self.groups
        if not groups:
            return "the script has not started"
        shown = [self._describe(group) for group in groups[: MAX_GROUPS + 1]]
        left = sum(len(group.ranks) for group in groups[MAX_GROUPS + 1 :])
        since = [began for rank in groups[0].ranks if (began := self.positions[rank].began)]
        if since and not left and groups[-1] in self.odd:
            shown[-1] += f", for {max(time.time() - max(since), 0.0):.0f} s"
        return "; ".join([*shown, *([f"{left} ranks are elsewhere"] if left else [])])

    def _describe(self, group: Group) -> str:
        position, several = group.position, len(group.ranks) > 1
        if not position.is_known:
            return f"the stacks of {self.subject(group)} can't be read ({position.where})"
        return f"{self.subject(group)} {position.verbs[several]} {position.where}"

    def subject(self, group: Group) -> str:
        """Return the ranks of a group as the subject of a sentence, with their node if they share it."""
        ranks, size = group.ranks, len(self.positions)
        nodes = {self.nodes.get(rank, "") for rank in ranks}
        node = nodes.pop() if len(nodes) == 1 else ""
        if size == 1:
            return "the script"
        if len(ranks) == 1:
            return f"rank {ranks[0]}" + (f" ({node})" if node else "")
        if len(ranks) == size:
            return f"all {size} ranks"
        if len(ranks) <= MAX_NAMED and group in self.odd:
            return _named(ranks) + (f" ({node})" if node else "")
        return f"{len(ranks)} ranks" + (f" of {node}" if node and len(set(self.nodes.values())) > 1 else "")

    def text(self) -> str:
        """Return the sentence, and the stacks by groups, the odd one first."""
        groups, odd = self.groups, self.odd
        lines = [str(self)]
        if self.silent_seconds < SILENT_SECONDS:
            lines.append("The script gave a sign of life just now: it may be healthy, and this a moment of its work.")
        elif math.isfinite(self.silent_seconds):  # else the scripts have been ended
            lines.append(f"No rank has given a sign of life (a line or a report) for {self.silent_seconds:.0f} s.")
        for group in [*odd, *(group for group in groups if group not in odd)]:
            of_stacks: dict[object, list[int]] = defaultdict(list)
            for rank in group.ranks:
                of_stacks[self.positions[rank].stacks].append(rank)
            for ranks in of_stacks.values():
                lines += ["", f"{_named(ranks)}: {group.position.where}"]
                for title, frames in self.positions[ranks[0]].stacks:
                    lines += [f"  {title}", *(f"    {frame}" for frame in frames)]
        return "\n".join([*lines, ""])


def picture(workers: Mapping[int, Stacks | str], silent_seconds: float) -> Picture:
    """Return the places of all ranks, by each worker's stacks, or by why it has none, such as "has ended"."""
    positions: dict[int, Position] = {}
    nodes: dict[int, str] = {}
    joined: dict[int, Last] = {}
    having = [stacks for stacks in workers.values() if isinstance(stacks, Stacks)]
    has_ranks = any(process.rank is not None for stacks in having for process in stacks.processes)
    for worker, stacks in sorted(workers.items()):
        if isinstance(stacks, str):
            verb, _, where = stacks.partition(" ")
            positions[worker] = Position(HAS if verb == "has" else IS, where)
            continue
        of_rank: dict[int, list[ProcessStacks]] = defaultdict(list)
        for process in stacks.processes:
            if process.rank is not None or not has_ranks:
                of_rank[worker if process.rank is None else process.rank].append(process)
        are_unread = len(of_rank) <= 1 and all(process.fault for process in stacks.processes)
        if printed := in_words(stacks.words) if are_unread else ():
            of_rank = {worker: [ProcessStacks(0, threads=printed)]}
        if stacks.joined and len(of_rank) == 1:
            joined |= dict.fromkeys(of_rank, stacks.joined)
        if not of_rank and not has_ranks:
            positions[worker] = Position(IS_IN, NO_PYTHON, is_known=False)
            nodes[worker] = stacks.node
        for rank, processes in of_rank.items():
            positions[rank] = position_of(processes)
            nodes[rank] = stacks.node
    return Picture(_numbered(positions, joined), nodes, silent_seconds)


def _named(ranks: Sequence[int]) -> str:
    """Return ranks by their numbers, such as `ranks 0 to 4, 6 and 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [text for each in parts for text in ([f"{each[0]} to {each[-1]}"] if len(each) > 2 else map(str, each))]
    listed = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _numbered(positions: Mapping[int, Position], joined: Mapping[int, Last]) -> dict[int, Position]:
    """Return the places with the numbers of the collectives, where those of all ranks in a place are known.

    They are equal if the ranks wait in the same one. One that was joined just now may not be the last.
    """
    numbered, of_place = dict(positions), defaultdict(list)
    for rank, position in positions.items():
        of_place[position.key].append(rank)
    for ranks in of_place.values():
        last = {rank: joined[rank] for rank in ranks if rank in joined}
        kinds, groups = {each.kind for each in last.values()}, {each.group for each in last.values()}
        latest = max((each.began for each in last.values()), default=math.inf)
        collective = positions[ranks[0]].collective
        is_numbered = collective not in ("", CHECKPOINTER)  # which has its own process group
        is_one = is_numbered and kinds <= {collective, ""} and len(groups) == 1  # NCCL does not say the kind
        if is_one and len(last) == len(ranks) and time.time() - latest >= SETTLED_SECONDS:
            for rank, each in last.items():
                where = f"{collective} #{each.sequence}"
                numbered[rank] = replace(positions[rank], verbs=WAITS, where=where, began=each.began)
    return numbered
