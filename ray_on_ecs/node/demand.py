"""GPUs and CPUs that the cluster has and needs, by kind of worker, read from Ray; the stack scales the workers by them.

Workers of a pool with GPUs are counted in GPUs, and those of a pool without in CPUs: the head offers neither, and a
worker with GPUs both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.node import resource_state
from ray_on_ecs.node.resource_state import DIGITS, TIMEOUT_SECONDS, Node, ResourceState
from ray_on_ecs.pools import Request, kind_of_node, kinds_of_request

# Key of the time at which the head has released the idle nodes, in Ray's key-value store, and how long that holds.
RELEASED, RELEASED_SECONDS = b"ray-on-ecs:released", 120.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Demand for one kind of worker: GPUs or CPUs that programs need, that there are and that are used, and its nodes.

    `idle_seconds` has an entry for each node that is not in use.
    """

    requested: int
    available: float
    used: float = 0.0
    in_use: int
    idle_seconds: tuple[float, ...] = ()

    @property
    def nodes(self) -> int:
        """The number of its nodes."""
        return self.in_use + len(self.idle_seconds)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Demand for each kind of worker, and the requests that no kind of worker can satisfy."""

    needs: dict[str, Need]
    unmet: tuple[Request, ...] = ()


def read(gcs_address: str, info: ClusterInfo) -> Demand:
    """Read the current demand from the GCS at `host:port`; any of Ray's errors if it doesn't answer in some seconds."""
    return demand_of(resource_state.read(gcs_address), info)


def demand_of(state: ResourceState, info: ClusterInfo) -> Demand:
    """Return the demand in a state of the cluster's resources."""
    unit = {kind: "GPU" if group["gpu"] else "CPU" for kind, group in info["groups"].items()}
    nodes: dict[str, list[Node]] = {kind: [] for kind in unit}
    for node in state.nodes:
        kind = kind_of_node(node.labels, info)
        if kind in nodes and (node.total.get("GPU") or node.total.get("CPU")):  # the head has neither
            nodes[kind].append(node)
    available = {kind: sum(node.total.get(unit[kind], 0) for node in nodes[kind]) for kind in unit}
    unmet: dict[str, Request] = {}

    def fitting(requests: Iterable[tuple[Request, int]]) -> Iterator[Fitting]:
        for request, count in requests:
            if kinds := kinds_of_request(request, info):
                yield request, count, kinds
            else:
                unmet[str(request)] = request

    waiting = _waiting(fitting(state.pending), unit, available)
    kept = _kept(fitting(state.requested), unit, available)
    needs = {kind: _need(nodes[kind], unit[kind], waiting[kind], kept[kind]) for kind in unit}
    return Demand(needs=needs, unmet=tuple(unmet.values()))


# A request, its number, and the kinds of worker that fit it.
Fitting = tuple[Request, int, list[str]]


def _waiting(pending: Iterable[Fitting], unit: Mapping[str, str], available: Mapping[str, float]) -> dict[str, float]:
    """Return the GPUs or CPUs for which work waits, by kind of worker.

    Work without GPUs that no other kind fits waits for one GPU, if there is none.
    """
    waiting, for_cpus = dict.fromkeys(unit, 0.0), set[str]()
    for request, count, kinds in pending:
        amount = request.resources.get(unit[kinds[0]], 0)
        waiting[kinds[0]] += amount * count
        if request.resources.get("CPU") and not (amount or any(available[kind] for kind in kinds)):
            for_cpus.add(kinds[0])
    return {kind: amount or float(kind in for_cpus) for kind, amount in waiting.items()}


def _kept(requested: Iterable[Fitting], unit: Mapping[str, str], available: Mapping[str, float]) -> dict[str, float]:
    """Return the GPUs or CPUs that programs request, by kind of worker: those that are there first."""
    kept, free = dict.fromkeys(unit, 0.0), dict(available)
    for request, count, kinds in requested:
        amount = request.resources.get(unit[kinds[0]], 0)
        same = [kind for kind in kinds if unit[kind] == unit[kinds[0]]]
        for _ in range(count):
            kind = next((kind for kind in same if free[kind] >= amount), kinds[0])
            kept[kind] += amount
            free[kind] -= amount
    return kept


def _need(nodes: Sequence[Node], unit: str, waiting: float, kept: float) -> Need:
    """Return the demand for one kind of worker; those with only CPUs in use count as one GPU."""
    used = sum(node.used(unit) for node in nodes) or float(any(node.used("CPU") > 0 for node in nodes))
    return Need(
        requested=math.ceil(round(max(used + waiting, kept), DIGITS)),
        available=sum(node.total.get(unit, 0) for node in nodes),
        used=used,
        in_use=sum(node.is_used for node in nodes),
        idle_seconds=tuple(node.idle_seconds for node in nodes if not node.is_used),
    )


def node_in_use(gcs_address: str, ip_address: str) -> bool | None:
    """Return True if a CPU or GPU of the node with this address is used, or reserved by a placement group.

    Return None if it is idle, and the head has released the idle nodes.
    """
    if any(node.is_used for node in resource_state.read_nodes(gcs_address) if node.address == ip_address):
        return True
    released = resource_state.gcs_client(gcs_address).internal_kv_get(RELEASED, timeout=TIMEOUT_SECONDS)
    return None if released and 0 <= time.time() - float(released) < RELEASED_SECONDS else False


def release_idle(gcs_address: str) -> None:
    """Tell the nodes that are idle now to release their tasks: the run that used them stops them, and no other runs."""
    now = str(time.time()).encode()
    resource_state.gcs_client(gcs_address).internal_kv_put(RELEASED, now, True, timeout=TIMEOUT_SECONDS)
