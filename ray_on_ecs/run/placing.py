"""Places of a run's workers on a Ray cluster: they are requested, get an actor each, and are numbered by nodes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.group import GroupError, NoPlacesError, Place, WorkerRank
from ray_on_ecs.run.ray_cluster import alive_nodes, has_nodes, has_places
from ray_on_ecs.run.ray_private import RAY_ERRORS
from ray_on_ecs.run.script_actor import Location, ScriptActor

# Between two questions to the head if the workers have places: a part of each start.
PLACES_SECONDS = 0.1
# Between two questions if the nodes of workers without places are still there.
NODES_SECONDS = 5.0
LOCATE_SECONDS = 0.25
# Workers that have places and have not begun after this time were stopped by the system, or hang in an import.
BEGIN_SECONDS = 300.0
# The workers above MIN of an elastic run that have places when the others have them, or so soon after, belong to it.
OTHERS_SECONDS = 1.0
# Calls of an actor at the same time: two polls, and a margin.
CONCURRENCY = 4
# A placement group, and the number of one of its bundles.
Bundle = tuple[PlacementGroup, int]


@dataclass(frozen=True)
class Placed:
    """A worker in its place, with its first actor; `gpus` are those of all workers of its node."""

    rank: WorkerRank
    place: Place
    gpus: tuple[str, ...]
    bundle: Bundle
    actor: Any


class Placing:
    """The places of one group of workers, and the seconds to wait for them. Any call may raise one of `RAY_ERRORS`."""

    def __init__(self, allocation: WorkerAllocation, seconds: float) -> None:
        self._allocation = allocation
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._next_look = time.monotonic() + NODES_SECONDS
        self._groups: list[PlacementGroup] = []
        self._others: list[PlacementGroup] = []
        self._locating: dict[Any, tuple[Any, Bundle]] = {}

    def poll(self) -> list[Placed]:
        """Wait a moment for the workers; return them by rank once all are in their places.

        Raises:
            NoPlacesError: They did not get their places within the time, or nodes of theirs are lost.
            GroupError: Their actors have not begun.
        """
        if not self._groups:
            # Those above the fewest stay requested: so the stack starts nodes for them, and the run knows of room.
            for count in (self._allocation.fewest, *[1] * (self._allocation.most - self._allocation.fewest)):
                self._request(count)
            self._others = self._groups[1:]
        if not self._locating:
            self._wait_for_places()
            return []
        return self._wait_for_locations()

    def _request(self, count: int) -> None:
        labels = dict(self._allocation.node_labels)
        bundles = [self._allocation.resources_per_worker] * count
        selector = [labels] * count if labels else None
        self._groups.append(placement_group(bundles, "PACK", bundle_label_selector=selector))

    def _wait_for_places(self) -> None:
        gang = self._groups[0]
        if not has_places(gang):
            time.sleep(PLACES_SECONDS)
            now = time.monotonic()
            if now > self._deadline:
                raise NoPlacesError(f"{self._allocation.fewest} workers had no places within {self._seconds:g} s")
            if now > self._next_look:
                self._next_look = now + NODES_SECONDS
                if not has_nodes(self._allocation):
                    raise NoPlacesError(f"the nodes of {self._allocation.fewest} workers are lost")
            return
        if self._others:
            time.sleep(OTHERS_SECONDS)
        ready = [group for group in self._others if has_places(group)]
        self._others = [group for group in self._others if group not in ready]
        self._deadline = time.monotonic() + BEGIN_SECONDS
        for bundle in [*((gang, index) for index in range(self._allocation.fewest)), *((group, 0) for group in ready)]:
            actor = self.start(bundle)
            self._locating[actor.locate.remote()] = (actor, bundle)

    def start(self, bundle: Bundle) -> Any:
        """Start an actor."""
        resources = self._allocation.resources_per_worker
        options: Any = ray.remote(ScriptActor)
        return options.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_concurrency=CONCURRENCY,
            scheduling_strategy=PlacementGroupSchedulingStrategy(*bundle),
        ).remote()

    def _wait_for_locations(self) -> list[Placed]:
        done, waiting = ray.wait(list(self._locating), num_returns=len(self._locating), timeout=LOCATE_SECONDS)
        if waiting:
            if time.monotonic() > self._deadline:
                raise GroupError(f"the workers have not begun within {BEGIN_SECONDS:.0f} s")
            return []
        locations: list[Location] = ray.get(done)
        return number(locations, [self._locating[reference] for reference in done], _nodes_on_shared_machines())

    def is_kept(self, placed: Placed) -> bool:
        """Return whether a worker that is lost may start again in its place."""
        group, bundle = placed.bundle
        table: dict[str, Any] = placement_group_table(group)
        node = placed.place.node_id
        is_same = table.get("state") == "CREATED" and table["bundles_to_node_id"][bundle] == node
        return is_same and node in {each["NodeID"] for each in alive_nodes()}

    def has_room(self) -> bool:
        """Return whether there are places for more workers of an elastic run."""
        return any(map(has_places, self._others))

    def close(self) -> None:
        """Give up the places.

        The first ones go last: the groups that wait would get their places, and Ray 2.60 keeps the resources of a group
        that is removed while it is placed.
        """
        for group in reversed(self._groups):
            with suppress(*RAY_ERRORS):
                remove_placement_group(group)


def number(locations: Sequence[Location], actors: Sequence[tuple[Any, Bundle]], shared: set[str]) -> list[Placed]:
    """Return the workers by rank: by nodes in the order of their places, and by GPUs.

    Each actor has a location and a bundle; `shared` are the nodes that are not alone on their machines.
    """
    nodes = list(dict.fromkeys(location.node_id for location in locations))
    order = sorted(
        range(len(locations)), key=lambda each: (nodes.index(locations[each].node_id), _natural(locations[each].gpus))
    )
    gpus: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for each in order:
        gpus[locations[each].node_id] += locations[each].gpus
    sizes = Counter(location.node_id for location in locations)
    local_ranks: Counter[str] = Counter()
    placed: list[Placed] = []
    for rank, each in enumerate(order):
        node = locations[each].node_id
        actor, bundle = actors[each]
        worker_rank = WorkerRank(rank, len(order), local_ranks[node], sizes[node], nodes.index(node))
        place = Place(locations[each].host, node, node in shared)
        placed.append(Placed(worker_rank, place, gpus[node], bundle, actor))
        local_ranks[node] += 1
    return placed


def _natural(gpus: Sequence[str]) -> list[tuple[int, str]]:
    """Return a key by which GPU 10 comes after GPU 9."""
    return [(int(gpu) if gpu.isdigit() else 0, gpu) for gpu in gpus]


def _nodes_on_shared_machines() -> set[str]:
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in alive_nodes()}
    counts = Counter(hosts.values())
    return {node for node, host in hosts.items() if counts[host] > 1}
