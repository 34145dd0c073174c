"""The rank that the others wait for: one sentence from the stacks of all ranks, and the stacks by groups.

A rank waits if the innermost frames of its main thread, up to the user's code, are those of a collective. One that does
not, while others do, is the odd one; else the ranks in a place where fewer are than elsewhere are.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import psutil

from ray_on_ecs.run.stacks import NO_RIGHTS, Frame, Joined, ProcessStacks, Stacks, in_words

COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "destroy_process_group", "gather", "gather_object", "init_device_mesh"),
    *("init_process_group", "monitored_barrier", "new_group", "new_subgroups", "recv", "recv_object_list", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
    "wait_tensor",
}
OF_COLLECTIVES = "/torch/distributed/"
OF_DDP = "/torch/nn/parallel/distributed.py"
DDP = "DistributedDataParallel"
BACKWARD = "_engine_run_backward"
# In files with these parts of Python and packages, a thread waits for another thread or a child process.
FOR_OTHERS = (
    *("/asyncio/", "/concurrent/futures/", "/joblib/", "/multiprocessing/", "/queue.py", "/selectors.py"),
    *("/socketserver.py", "/subprocess.py", "/threading.py", "/torch/multiprocessing/", "/torch/utils/data/"),
)
DATA_WORKER, IN_DATA_WORKER, IN_THREAD = "pt_data_worker", "in a data loader worker", "in a thread"
FOR_THREADS = ("/concurrent/futures/_base", "/concurrent/futures/thread", "/queue.py", "/threading.py")
FORKED = "BaseProcess._bootstrap"  # of multiprocessing, in a new process
NO_PYTHON = "the script runs no Python process"
WAITS, IS_IN, IS, HAS = ("waits in", "wait in"), ("is in", "are in"), ("is", "are"), ("has", "have")
STOPPED = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP), and goes on at SIGCONT",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: "a process that has ended",
}
# Groups of a sentence after the first one, and ranks that are named.
MAX_GROUPS, MAX_NAMED = 4, 3
# A rank that gave a sign of life just now may be healthy.
SILENT_SECONDS = 5.0
# The last collective of a rank is known some seconds after it was joined.
SETTLED_SECONDS = 10.0


@dataclass(frozen=True)
class Position:
    """The place of a rank.

    Attributes:
        verbs: The verb of a sentence, for one rank and for several.
        where: The place, as it stands after the verb.
        collective: The collective in which it waits, or nothing.
        is_known: False if the stacks can't be read.
        stacks: The stacks that show it, by a title.
        began: Since when it waits (Unix time), if that is known.
    """

    verbs: tuple[str, str]
    where: str
    collective: str = ""
    is_known: bool = True
    stacks: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    began: float | None = None

    @property
    def is_waiting(self) -> bool:
        """True in a collective."""
        return bool(self.collective)

    @property
    def key(self) -> tuple[object, ...]:
        """What ranks in the same place share."""
        return self.verbs, self.where


@dataclass(frozen=True)
class Group:
    """Ranks in the same place."""

    position: Position
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """The places of all ranks.

    Attributes:
        positions: The places.
        nodes: Their nodes by rank; empty on one machine.
        silent_seconds: How long no rank has given a sign of life.
    """

    positions: Mapping[int, Position]
    nodes: Mapping[int, str]
    silent_seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """The groups: those that wait, or the largest one, first, and the odd ones after them."""
        found: dict[tuple[object, ...], Group] = {}
        for rank, position in sorted(self.positions.items()):
            found.setdefault(position.key, Group(position)).ranks.append(rank)
        return sorted(
            found.values(),
            key=lambda group: (not group.position.is_known, not group.position.is_waiting, -len(group.ranks)),
        )

    @property
    def odd(self) -> list[Group]:
        """The groups that the others wait for; empty if that is not known."""
        known = [group for group in self.groups if group.position.is_known]
        others = [group for group in known if not group.position.is_waiting]
        if 0 < len(others) < len(known):
            return others
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
    """Return the places of all ranks.

    Args:
        workers: The stacks of each worker, or why it has none, after "rank 5", such as "has ended".
        silent_seconds: How long no rank has given a sign of life.
    """
    positions: dict[int, Position] = {}
    nodes: dict[int, str] = {}
    joined: dict[int, Joined] = {}
    has_ranks = any(process.rank is not None for each in workers.values() for process in _processes(each))
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
            positions[rank] = _position(processes)
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


def _processes(stacks: Stacks | str) -> Sequence[ProcessStacks]:
    return () if isinstance(stacks, str) else stacks.processes


def _position(processes: Sequence[ProcessStacks]) -> Position:
    """Return the place of a rank by its main process and what that waits for."""
    pids = {process.pid for process in processes}
    main = next((process for process in processes if process.parent not in pids), processes[0])
    shown = (("main thread", main.threads[0].frames),) if main.threads else ()
    if state := STOPPED.get(main.state):
        return Position(IS, state, stacks=shown)
    if not main.threads:
        return Position(IS_IN, main.fault or NO_RIGHTS, is_known=False)
    frames = main.threads[0].frames
    inner = _inner(frames)
    user = next((frame for frame in frames if frame.is_users), None)
    at = f", {user.place.rpartition(', ')[2]}" if user else ""
    if collective := _collective(inner):
        return Position(WAITS, collective + at, collective, stacks=shown)
    if other := _other(main, processes, inner):
        return other
    if _is_backward(inner):
        return Position(IS_IN, f"backward{at}", "all_reduce", stacks=shown)
    where = user.place if user else (frames[0].place if frames else "no Python code")
    return Position(IS_IN, where, stacks=shown)


def _numbered(positions: Mapping[int, Position], joined: Mapping[int, Joined]) -> dict[int, Position]:
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
        is_one = kinds == {positions[ranks[0]].collective} and len(groups) == 1
        if is_one and len(last) == len(ranks) and time.time() - latest >= SETTLED_SECONDS:
            for rank, each in last.items():
                where = f"{each.kind} #{each.number}"
                numbered[rank] = replace(positions[rank], verbs=WAITS, where=where, began=each.began)
    return numbered


def _inner(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that the user's code has called, the innermost one first."""
    return list(takewhile(lambda frame: not frame.is_users, frames))


def _collective(inner: Sequence[Frame]) -> str:
    """Return the collective that these frames are in, as the user's code has called it; empty if there is none."""
    of_torch = [frame for frame in inner if OF_COLLECTIVES in frame.file]
    named = [frame.function for frame in of_torch if frame.function in COLLECTIVES]
    if named:
        return named[-1]
    if of_torch and any(OF_DDP in frame.file for frame in inner):
        return DDP  # its parameters are compared and copied when it is made
    return of_torch[0].function if of_torch and of_torch[0] == inner[0] else ""


def _waits_for_others(inner: Sequence[Frame]) -> bool:
    return any(part in frame.file for frame in inner[:4] for part in FOR_OTHERS)


def _is_backward(inner: Sequence[Frame]) -> bool:
    return any(frame.function == BACKWARD for frame in inner)


def _other(main: ProcessStacks, processes: Sequence[ProcessStacks], inner: Sequence[Frame]) -> Position | None:
    """Return the place of another thread or a child process, if a main thread with these frames waits for one."""
    is_backward = _is_backward(inner)  # hooks may run on other threads
    if not (is_backward or _waits_for_others(inner)):
        return None
    waits_for_thread = is_backward or any(part in frame.file for frame in inner[:4] for part in FOR_THREADS)
    others = sorted(_others(main, processes), key=lambda other: (other[0] == IN_THREAD) != waits_for_thread)
    for title, own in others:
        found = next((frame for frame in own if frame.is_users), own[0] if title == IN_DATA_WORKER else None)
        if found:
            stacks = ((title, own), ("main thread", main.threads[0].frames))
            return Position(IS_IN, f"{found.place}, {title}", stacks=stacks)
    return None


def _others(main: ProcessStacks, processes: Sequence[ProcessStacks]) -> list[tuple[str, tuple[Frame, ...]]]:
    """Return the stacks of a rank beside its main thread's that don't wait themselves, with titles.

    A forked process has its parent's frames below its own.
    """
    found = [(IN_THREAD, thread.frames) for thread in main.threads[1:]]
    for process in processes:
        if process is not main:
            title = IN_DATA_WORKER if process.name == DATA_WORKER else "in a child process"
            own = [tuple(takewhile(lambda frame: frame.function != FORKED, each.frames)) for each in process.threads]
            found += [(title, frames) for frames in own]
    return [(title, frames) for title, frames in found if frames and not _waits_for_others(_inner(frames))]
