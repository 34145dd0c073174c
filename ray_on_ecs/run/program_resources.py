"""The resources of a Ray program: the nodes that it uses, and what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util import placement_group_table

from ray_on_ecs.periodic import run_every
from ray_on_ecs.run.ray_cluster import Resources, instance_kind
from ray_on_ecs.run.ray_private import actors_of, jobs_of
from ray_on_ecs.tracking.cost import InstanceKind

LOOK_SECONDS = 5.0
WAITING = ("PENDING", "RESCHEDULING")


def instances() -> Counter[InstanceKind]:
    """Return the number of instances of each kind on which the program has places or actors; none if Ray is away."""
    try:
        labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
        return Counter(instance_kind(labels.get(node, {})) for node in _nodes(_jobs()))
    except (RayError, RuntimeError, ValueError):
        return Counter()


def missing() -> Counter[str]:
    """Return what the program waits for, such as 2 GPUs, while it has no place at all; nothing if Ray is away."""
    try:
        groups = [*_placement_groups(_jobs())]
    except (RayError, RuntimeError, ValueError):
        return Counter()
    if not groups or any(group["state"] not in WAITING for group in groups):
        return Counter()
    wanted: Counter[str] = Counter()
    for group in groups:
        for bundle in group["bundles"].values():
            wanted.update({kind: int(number) for kind, number in bundle.items() if kind in ("CPU", "GPU")})
    return +wanted


@contextmanager
def watching(on_wait: Callable[[Counter[str]], None]) -> Generator[None]:
    """Until the block ends, tell when the program begins to wait for resources, and with nothing when it has them."""
    before: Counter[str] = Counter()
    told: Counter[str] = Counter()

    def look() -> None:
        nonlocal before, told
        now = missing()
        # A program has no places for a moment whenever it starts workers.
        if (now == before or not now) and now != told:
            told = now
            on_wait(now)
        before = now

    with run_every(LOOK_SECONDS, look, "resources of the program"):
        yield


def describe(wanted: Resources | Counter[str]) -> str:
    """Return resources in words: `2 GPUs and 4 CPUs`."""
    named = [f"{number:g} {kind}{'s' if number != 1 else ''}" for kind, number in sorted(wanted.items(), reverse=True)]
    return " and ".join(named)


def _jobs() -> set[str]:
    """Return the IDs of the jobs as which processes that this one has started have joined Ray."""
    return jobs_of({each.pid for each in psutil.Process().children(recursive=True)})


def _placement_groups(jobs: set[str]) -> Iterator[dict[str, Any]]:
    table: dict[str, Any] = placement_group_table()
    for key, group in table.items():
        if key.endswith(tuple(jobs)) and group["state"] != "REMOVED":
            yield group


def _nodes(jobs: set[str]) -> set[str]:
    places = {node for group in _placement_groups(jobs) for node in group["bundles_to_node_id"].values() if node}
    actors = [each for job in jobs for each in actors_of(job) if each["State"] == "ALIVE"]
    return places | {each["Address"]["NodeID"] for each in actors}
