"""The resources of a Ray program: the nodes that it uses, its workers there, and what it waits for."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import psutil

from ray_on_ecs import pools
from ray_on_ecs.cluster_info import read_cluster_info
from ray_on_ecs.errors import one_line
from ray_on_ecs.node import resource_state
from ray_on_ecs.periodic import run_every
from ray_on_ecs.pools import GPU_RESOURCE, Request, kind_of_node, kind_of_request
from ray_on_ecs.run.ray_cluster import (
    alive_nodes,
    describe_nodes,
    instances_needed,
    instances_of,
    placement_groups,
    places,
)
from ray_on_ecs.run.ray_private import RAY_ERRORS, actors_of, draining_nodes, jobs_of
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.tracking.cost import InstanceKind

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # a look asks Ray's head
# A program that fails so soon after one of its nodes was draining has failed for that.
RECLAIMED_SECONDS = 180.0
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head
# CPUs and GPUs by their names; a part of one is a number below 1.
Needs = Counter[Any]
WAITING = ("PENDING", "RESCHEDULING")


def instances(pid: int) -> Counter[InstanceKind]:
    """Return the number of instances of each kind on which the program has places or actors; none if Ray is away.

    The head is not a cost of a run, though Ray Train's controller is an actor there.
    """
    try:
        names = nodes(pid)
        heads = {node["NodeID"] for node in alive_nodes() if HEAD in node["Resources"]} if names else set()
        return instances_of(names - heads)
    except RAY_ERRORS:
        return Counter()


def nodes(pid: int) -> set[str]:
    """Return the IDs of the nodes on which the program has places or actors; none if Ray is away."""
    try:
        jobs = _jobs(pid)
        return {node for node, _ in places(jobs)} | set(_actors(jobs))
    except RAY_ERRORS:
        return set()


def kinds(pid: int) -> set[str]:
    """Return the kinds of the nodes on which the program has places or actors; none without a stack, or without Ray."""
    info, names = read_cluster_info(), nodes(pid)
    if not (info and names):
        return set()
    try:
        found = {kind_of_node(node["Labels"], info) for node in alive_nodes() if node["NodeID"] in names}
    except RAY_ERRORS:
        return set()
    return {kind for kind in found if kind and info["groups"][kind]["gpu"]}


def hardware(pid: int) -> dict[str, Any] | None:
    """Return the hardware of the program's workers, as rank 0 of a script reports it; None while there are none.

    Its workers are the bundles of its placement groups, those with a GPU if there are any; without groups its actors,
    of which Ray does not tell the threads.
    """
    try:
        jobs = _jobs(pid)
        resources = {node["NodeID"]: node["Resources"] for node in alive_nodes()} if jobs else {}
        held = [place for place in places(jobs) if place[0] in resources] if jobs else []
        actors = [] if held else [node for node in _actors(jobs) if node in resources]
    except RAY_ERRORS:
        return None
    if not (held or actors):
        return None
    on_gpus = [place for place in held if place[1].get("GPU")]
    workers = on_gpus or held
    node = resources[workers[0][0] if workers else actors[0]]
    device = _gpu_of(node) if on_gpus or (actors and node.get("GPU")) else "CPU"
    threads = {"threads_per_worker": max(int(workers[0][1].get("CPU", 1)), 1)} if workers else {}
    return {"workers": len(workers or actors), "device": device, **threads, "node_cpus": int(node.get("CPU", 0))}


def requests(pid: int) -> list[Request]:
    """Return what the program's placement groups wait for, by bundles; nothing if Ray does not answer."""
    try:
        jobs, gangs = tuple(_jobs(pid)), resource_state.read_gangs(os.environ["RAY_ADDRESS"])
    except Exception as cause:  # any of Ray's errors
        logger.debug(f"what the program waits for is not known ({one_line(cause)})")
        return []
    return [request for group, waiting in gangs.items() if group.endswith(jobs) for request in waiting]


def unmet(waiting: Collection[Request]) -> str:
    """Return the line for a request that no pool of the stack can hold; empty if there is none."""
    info = read_cluster_info()
    for request in waiting if info else ():
        if info and kind_of_request(request, info) is None:
            return f"no node of the stack can have {request}: it has {pools.describe(info)}"
    return ""


def missing(pid: int) -> Needs:
    """Return the resources that the program waits for while it does not have any; nothing if Ray does not answer."""
    try:
        groups = placement_groups(_jobs(pid)).values()
    except RAY_ERRORS:
        return Counter()
    if not groups or any(group["state"] not in WAITING for group in groups):
        return Counter()
    needs: Needs = Counter()
    for group in groups:
        for bundle in group["bundles"].values():
            needs.update({kind: number for kind, number in bundle.items() if kind in ("CPU", "GPU")})
    return +needs


class ProgramWatch:
    """Looks at what a program waits for, why EC2 does not start it, and at its nodes.

    Attributes:
        pid: The process whose descendant the program is; 0 while it does not run.
        waits_since: When the present wait began (`time.monotonic`), or None.
        unmet: The line for a request that no pool of the stack can hold; or empty.
        hardware: That of the program's workers when it had most of them; see `hardware`.
    """

    def __init__(self, on_wait: Callable[[Needs], None]) -> None:
        self._on_wait = on_wait
        self._nodes: Collection[str] = ()
        self._reclaimed_at = -math.inf
        self._last_needs: Needs = Counter()
        self._reported_needs: Needs = Counter()
        self._shortage: Shortage | None = None
        self.unmet = ""
        self.hardware: dict[str, Any] | None = None
        self.pid = 0
        self.waits_since: float | None = None

    def running(self) -> AbstractContextManager[None]:
        """Look every few seconds until the block ends."""
        return run_every(LOOK_SECONDS, self.look, "resources of the program")

    def look(self) -> None:
        """Look once. A look that fails counts as one that finds nothing missing: the program may train."""
        try:
            self._look()
        except Exception as cause:
            self.waits_since = None
            logger.warning(f"the resources that the program waits for are unknown ({one_line(cause)})")

    def was_reclaimed(self) -> bool:
        """Return whether the program's nodes are being reclaimed, or were a short while ago; print each once."""
        self._look_at_nodes()
        is_recent = time.monotonic() - self._reclaimed_at < RECLAIMED_SECONDS
        self._nodes, self._reclaimed_at = (), -math.inf
        return is_recent

    def _look_at_nodes(self) -> None:
        self._nodes = nodes(self.pid) or self._nodes  # none while it starts workers, and when it has ended
        if not draining_nodes().keys().isdisjoint(self._nodes):
            self._reclaimed_at = time.monotonic()

    def _look(self) -> None:
        self._look_at_nodes()
        seen = filter(None, (self.hardware, hardware(self.pid)))
        # Ray Train's controller is an actor before its workers have places.
        self.hardware = max(seen, key=lambda each: ("threads_per_worker" in each, each["workers"]), default=None)
        needs = missing(self.pid)
        if not needs:
            self.waits_since = self._shortage = None
        elif self.waits_since is None:
            self.waits_since = time.monotonic()
        self.unmet = unmet(requests(self.pid)) if needs else ""
        # At two looks: for a moment while it starts workers, a program does not have places.
        if (needs == self._last_needs or not needs) and needs != self._reported_needs:
            self._reported_needs = needs
            self._on_wait(needs)
        if needs and self._reported_needs and not self.unmet:
            self._shortage = self._shortage or self._find_shortage(needs)
            if self._shortage:
                self._shortage.look_if_due()
                if self._shortage.is_before_start:
                    self.waits_since = time.monotonic()
        self._last_needs = needs

    def _find_shortage(self, needs: Needs) -> Shortage | None:
        """Return the watch of the node group that the head starts for the first request, with all of its kind."""
        waiting = requests(self.pid) or [Request({kind: min(number, 1) for kind, number in needs.items()})]
        alike = [each.resources.get("GPU", 0) for each in waiting if each.conditions == waiting[0].conditions]
        info, workers = read_cluster_info(), max(math.ceil(sum(alike)), 1)
        kind = kind_of_request(waiting[0], info) if info else None
        if info is None or kind is None:
            return None
        use_gpu = bool(waiting[0].resources.get("GPU"))
        return Shortage(info, kind, lambda: instances_needed(workers, kind, info, use_gpu=use_gpu), datetime.now(UTC))

    def shortage(self, seconds: float) -> str | None:
        """Return the resources that the program has not got within `seconds`, or None if it need not wait longer."""
        since, watch, needs = self.waits_since, self._shortage, self._reported_needs  # another thread changes them
        if since is None or not needs or time.monotonic() - since < seconds:
            return None
        way_out = self.unmet or (watch.line if watch else "") or "ask for fewer workers in the program, or add nodes"
        return f"the program waited {seconds:.0f} s for {describe(needs)}, but {describe_nodes()}; {way_out}"


def describe(needs: Needs) -> str:
    """Return resources in words: `2 GPUs and 4 CPUs`."""
    named = [f"{number:g} {kind}{'s' if number != 1 else ''}" for kind, number in sorted(needs.items(), reverse=True)]
    return " and ".join(named)


def _jobs(pid: int) -> set[str]:
    """Return the IDs of the jobs as which descendants of a process have joined Ray."""
    try:
        return jobs_of({process.pid for process in psutil.Process(pid).children(recursive=True)}) if pid else set()
    except psutil.NoSuchProcess:
        return set()


def _actors(jobs: Collection[str]) -> list[str]:
    """Return the node of each actor of the jobs."""
    actors = [actor for job in jobs for actor in actors_of(job) if actor["State"] == "ALIVE"]
    return [actor["Address"]["NodeID"] for actor in actors]


def _gpu_of(resources: Mapping[str, float]) -> str:
    """Return the name of a node's GPU, which Ray gives as a resource such as `accelerator_type:A10G`."""
    kinds = (name.removeprefix(GPU_RESOURCE) for name in resources if name.startswith(GPU_RESOURCE))
    return next(kinds, "GPU")
