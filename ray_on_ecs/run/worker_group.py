"""Workers as actors of Ray: their places, their ranks, and the driver's polls.

A worker whose process is lost is started again in its place, while the others stay. If the place itself is lost, as
with its node, the driver gives up the group and makes another one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_on_ecs import logs
from ray_on_ecs.errors import one_line
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.exchange import Silence
from ray_on_ecs.run.group import Directive, GroupError, NoPlacesError, Place, WorkerRank, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.ray_cluster import alive_nodes, forwarded
from ray_on_ecs.run.worker import ScriptWorker, Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# Between two questions to the head if the workers have places: a part of each start.
PLACES_SECONDS = 0.1
# How long a worker may keep an answer that has nothing new.
ANSWER_SECONDS = 0.5
# An actor whose node is out of reach for a while answers again; one that does not for so long is lost.
PATIENCE_SECONDS = 120.0
# Workers that have places and have not begun after this time were stopped by the system, or hang in an import.
BEGIN_SECONDS = 300.0
# The workers above MIN of an elastic run that have places when the others have them, or so soon after, belong to it.
OTHERS_SECONDS = 1.0
# Between two looks for more room of an elastic run; a start of more workers costs it some seconds each time.
GROW_SECONDS = 60.0
# How long the last lines of the workers may take.
LINES_SECONDS, LINES_POLL_SECONDS = 5.0, 0.05
# Before Ray's reason why an actor's process ended, in its message.
EXIT_DETAIL = "Worker exit detail:"
# Calls of an actor at the same time: two polls, and a margin.
CONCURRENCY = 4


@dataclass(frozen=True)
class Location:
    """The node and the GPUs of an actor."""

    node_id: str
    host: str
    gpus: tuple[str, ...]


class ScriptActor:
    """A worker's process."""

    _worker: ScriptWorker

    def locate(self) -> Location:
        """Return where it is."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Location(ray.get_runtime_context().get_node_id(), get_node_ip_address(), tuple(gpus))

    def begin(self, settings: Settings, rank: WorkerRank, place: Place, gpus: Sequence[str], mark: str) -> None:
        """Start the worker.

        Args:
            settings: The run's settings.
            rank: The worker's rank.
            place: Its place.
            gpus: The GPUs of all workers of the node: a script takes one by LOCAL_RANK, as under torchrun.
            mark: The last line to print.
        """
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        logs.set_up("", settings.config.variables)
        self._worker = ScriptWorker(settings, rank, place)
        threading.Thread(target=self._run, args=(mark,), name="worker", daemon=True).start()

    def _run(self, mark: str) -> None:
        self._worker.run()
        print(mark, flush=True)

    def poll(self, number: int, directive: Directive, known: int, seconds: float) -> tuple[int, WorkerStatus]:
        """See Exchange."""
        return self._worker.exchange.poll(number, directive, known, seconds)


class Member:
    """The driver's view of one worker."""

    def __init__(self, actor: Any, beginning: Any) -> None:
        self.actor = actor
        self.beginning: Any = beginning  # the reference of `begin`, until it has returned
        self.version = -1
        self.status = WorkerStatus()
        self.told: Directive | None = None
        self.polls = 0  # that are under way
        self.silence = Silence()


class RayGroup:
    """See Group.

    Args:
        settings: The settings of the workers.
        allocation: Their number and their resources.
        seconds: How long to wait for the places.
    """

    def __init__(self, settings: Settings, allocation: WorkerAllocation, seconds: float) -> None:
        self.ranks: list[WorkerRank] = []
        self.places: list[Place] = []
        self.lost: dict[int, str] = {}
        self.next_poll = 1
        self._settings = settings
        self._allocation = allocation
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        # Those above the fewest stay requested: so the stack starts nodes for them, and the run knows of room.
        self._gang = self._request(allocation.fewest)
        self._others = [self._request(1) for _ in range(allocation.most - allocation.fewest)]
        self._bundles: list[tuple[PlacementGroup, int]] = []  # by rank, once located
        self._locating: dict[Any, tuple[Any, tuple[PlacementGroup, int]]] = {}
        self._gpus: list[list[str]] = []
        self._members: dict[int, Member] = {}
        self._under_way: dict[Any, int] = {}
        self._grow_at = 0.0
        self._ended_before = forwarded.ended

    def _request(self, count: int) -> PlacementGroup:
        labels = self._allocation.node_labels
        bundles = [self._allocation.resources_per_worker] * count
        return placement_group(bundles, "PACK", bundle_label_selector=[labels] * count if labels else None)

    def poll(self, directive: Directive) -> WorkerStatuses:
        """See Group."""
        try:
            if not self._locating:
                self._wait_for_places()
            elif not self._members:
                self._wait_for_locations()
            else:
                return self._poll(directive)
        except RayError as cause:
            raise GroupError(_reason(cause)) from cause
        return {}

    def _poll(self, directive: Directive) -> WorkerStatuses:
        self._take_begun()
        self._send(directive)
        self._take_answers()
        for rank, member in self._members.items():
            limit = BEGIN_SECONDS if member.beginning is not None else PATIENCE_SECONDS
            if rank not in self.lost and member.silence.measure() > limit:
                self._lose(rank, f"its process has not answered for {limit:.0f} s")
        return {rank: member.status for rank, member in self._members.items() if rank not in self.lost}

    def _wait_for_places(self) -> None:
        """Wait a moment for the places, and start the actors in them.

        Raises:
            NoPlacesError: The time is over.
        """
        if not _has_places(self._gang):
            time.sleep(PLACES_SECONDS)
            if time.monotonic() > self._deadline:
                count = self._allocation.fewest
                raise NoPlacesError(f"{count} workers had no places within {self._seconds:g} s")
            return
        if self._others:
            time.sleep(OTHERS_SECONDS)
        ready = [group for group in self._others if _has_places(group)]
        bundles = [(self._gang, index) for index in range(self._allocation.fewest)] + [(group, 0) for group in ready]
        self._others = [group for group in self._others if group not in ready]
        self._deadline = time.monotonic() + BEGIN_SECONDS
        for bundle in bundles:
            actor = self._actor(bundle)
            self._locating[actor.locate.remote()] = (actor, bundle)

    def _actor(self, bundle: tuple[PlacementGroup, int]) -> Any:
        resources = self._allocation.resources_per_worker
        options: Any = ray.remote(ScriptActor)
        return options.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_concurrency=CONCURRENCY,
            scheduling_strategy=PlacementGroupSchedulingStrategy(*bundle),
        ).remote()

    def _wait_for_locations(self) -> None:
        """Wait a moment for the actors, and number them: by nodes in the order of their places, and by GPUs."""
        done, waiting = ray.wait(list(self._locating), num_returns=len(self._locating), timeout=POLL_SECONDS)
        if waiting:
            if time.monotonic() > self._deadline:
                raise GroupError(f"the workers have not begun within {BEGIN_SECONDS:.0f} s")
            return
        locations: list[Location] = ray.get(done)
        actors = [self._locating[reference] for reference in done]
        nodes = list(dict.fromkeys(location.node_id for location in locations))
        order = sorted(
            range(len(done)), key=lambda each: (nodes.index(locations[each].node_id), _natural(locations[each].gpus))
        )
        gpus: dict[str, list[str]] = defaultdict(list)
        for each in order:
            gpus[locations[each].node_id] += locations[each].gpus
        shared = _nodes_on_shared_machines()
        sizes = Counter(location.node_id for location in locations)
        local_ranks: Counter[str] = Counter()
        for rank, each in enumerate(order):
            location = locations[each]
            node = location.node_id
            self.ranks.append(WorkerRank(rank, len(order), local_ranks[node], sizes[node], nodes.index(node)))
            self.places.append(Place(location.host, node, node in shared))
            self._gpus.append(gpus[node])
            local_ranks[node] += 1
            actor, bundle = actors[each]
            self._bundles.append(bundle)
            self._begin(rank, actor)
        self._grow_at = time.monotonic() + GROW_SECONDS

    def _begin(self, rank: int, actor: Any) -> None:
        place, gpus = self.places[rank], self._gpus[rank]
        begun = actor.begin.remote(self._settings, self.ranks[rank], place, gpus, forwarded.mark)
        self._members[rank] = Member(actor, begun)

    def _take_begun(self) -> None:
        waiting = {member.beginning: rank for rank, member in self._members.items() if member.beginning is not None}
        if not waiting:
            return
        are_all = len(waiting) == len(self._members)
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS if are_all else 0)
        for reference in done:
            rank = waiting[reference]
            member = self._members[rank]
            try:
                ray.get(reference)
            except RayError as error:
                self._lose(rank, _reason(error))
            else:
                member.beginning = None
                member.silence.end()

    def _send(self, directive: Directive) -> None:
        """Poll each worker that is not being polled, or does not know the directive yet."""
        for rank, member in self._members.items():
            if rank in self.lost or member.beginning is not None:
                continue
            if member.polls == 0 or (member.polls == 1 and member.told != directive):
                reference = member.actor.poll.remote(self.next_poll, directive, member.version, ANSWER_SECONDS)
                self._under_way[reference] = rank
                self.next_poll += 1
                member.polls += 1
                member.told = directive

    def _take_answers(self) -> None:
        if not self._under_way:
            time.sleep(POLL_SECONDS)
            return
        done, waiting = ray.wait(list(self._under_way), num_returns=1, timeout=POLL_SECONDS)
        if waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            done += more
        for reference in done:
            rank = self._under_way.pop(reference)
            member = self._members[rank]
            member.polls -= 1
            try:
                version, status = ray.get(reference)
            except ActorUnavailableError as cause:
                logger.debug(f"rank {rank} is out of reach: {one_line(cause)}")
            except RayError as cause:
                self._lose(rank, _reason(cause))
            else:
                member.silence.end()
                if version >= member.version:  # of two answers the older one may arrive last
                    member.version, member.status = version, status

    def _lose(self, rank: int, reason: str) -> None:
        if rank not in self.lost:
            logger.debug(f"rank {rank} is lost: {reason}")
            self.lost[rank] = reason
            with suppress(RayError):
                ray.kill(self._members[rank].actor)

    def replace_lost(self) -> bool:
        """See Group."""
        if len(self.lost) == len(self._members):
            return False
        for rank in self.lost:
            group, bundle = self._bundles[rank]
            table: dict[str, Any] = placement_group_table(group)
            if table.get("state") != "CREATED" or table["bundles_to_node_id"][bundle] != self.places[rank].node_id:
                return False
        alive = {node["NodeID"] for node in alive_nodes()}
        if any(self.places[rank].node_id not in alive for rank in self.lost):
            return False
        for rank in self.lost:
            self._under_way = {reference: other for reference, other in self._under_way.items() if other != rank}
            self._begin(rank, self._actor(self._bundles[rank]))
        self.lost = {}
        return True

    def can_grow(self) -> bool:
        """See Group: at most once a minute."""
        if not self._others or time.monotonic() < self._grow_at:
            return False
        self._grow_at = time.monotonic() + GROW_SECONDS
        return any(map(_has_places, self._others))

    def close(self) -> None:
        """See Group: the last lines of workers that have left are on their way."""
        have_left = sum(member.status.has_left for member in self._members.values())
        until = time.monotonic() + LINES_SECONDS
        while forwarded.ended < self._ended_before + have_left and time.monotonic() < until:
            time.sleep(LINES_POLL_SECONDS)
        for member in self._members.values():
            with suppress(RayError):
                ray.kill(member.actor)
        for group in (self._gang, *self._others, *(group for group, _ in self._bundles)):
            with suppress(RayError, ValueError):
                remove_placement_group(group)


def _has_places(group: PlacementGroup) -> bool:
    """Return whether a placement group has its places.

    `PlacementGroup.wait` takes whole seconds and leaves something on the head each time; `ready` starts a process.
    """
    table: dict[str, Any] = placement_group_table(group)  # empty if the head does not answer
    return table.get("state") == "CREATED"


def _natural(gpus: Sequence[str]) -> list[tuple[int, str]]:
    """Return a key by which GPU 10 comes after GPU 9."""
    return [(int(gpu) if gpu.isdigit() else 0, gpu) for gpu in gpus]


def _nodes_on_shared_machines() -> set[str]:
    """Return the nodes that are not alone on their machines."""
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in alive_nodes()}
    counts = Counter(hosts.values())
    return {node for node, host in hosts.items() if counts[host] > 1}


def _reason(error: Exception) -> str:
    if isinstance(error, RayActorError):
        detail = str(error).partition(EXIT_DETAIL)[2] or error  # the IDs before it tell the user nothing
        return f"a process of the run ended ({one_line(detail)})"
    return one_line(f"{type(error).__name__}: {error}")
