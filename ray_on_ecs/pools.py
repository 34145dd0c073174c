"""Pools of workers and their node groups: which of them a run may use, a Ray node belongs to, or a request is for.

A pool is a set of equal instances; it has a node group in each of its zones, which is a kind of node. Functions without
side effects, for head, runs and command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import CPU_POOL, DEFAULT_POOL, INSTANCE_LABELS, NODE_GROUP_LABEL, label_of_pool
from ray_on_ecs.errors import UsageError, counted

ZONE_LABEL, TYPE_LABEL = INSTANCE_LABELS["zone"], INSTANCE_LABELS["instance_type"]
# Ray's label of a node's GPU, and the prefix of its resource with the same name.
# https://docs.ray.io/en/latest/ray-core/scheduling/accelerators.html
GPU_LABEL, GPU_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"

# Keys of the stack's configuration for the two pools that it describes outside `workerPools`.
SETTINGS = {
    DEFAULT_POOL: {
        "min": "minWorkers",
        "max": "maxWorkers",
        "instanceTypes": "workerInstanceTypes",
        "zones": "availabilityZones or subnetIds",
        "spot": "spot",
    },
    CPU_POOL: {"min": "minCpuWorkers", "max": "maxCpuWorkers", "instanceTypes": "cpuWorkerInstanceTypes"},
}


@dataclass(frozen=True)
class Condition:
    """Condition of a label selector: the label has one of the values, or none of them with `is_not`."""

    label: str
    values: frozenset[str]
    is_not: bool = False


@dataclass(frozen=True)
class Request:
    """Resources that a program waits for on one node, with its conditions on the node's labels."""

    resources: Mapping[str, float]
    conditions: tuple[Condition, ...] = ()


def kinds_by_pool(info: ClusterInfo) -> dict[str, list[str]]:
    """Return the kinds of each pool, in order of preference."""
    pools: dict[str, list[str]] = {}
    for kind, group in info["groups"].items():
        pools.setdefault(group["pool"], []).append(kind)
    return pools


def setting(pool: str, key: str) -> str:
    """Return the configuration key of a pool's value, such as `maxWorkers` or `workerPools.h100.max` for `max`."""
    own = SETTINGS.get(pool)
    return own.get(key, SETTINGS[DEFAULT_POOL][key]) if own else f"workerPools.{pool}.{key}"


def gpus_of(group: NodeGroup) -> int:
    """Return the GPUs of each of the nodes."""
    return group["units"] if group["gpu"] else 0


def candidates(info: ClusterInfo, *, gpus: Sequence[str] = (), pools: Sequence[str] = ()) -> list[str]:
    """Return the kinds of node that a run may use, in the order in which it tries them.

    Args:
        info: The stack's workers.
        gpus: Names of GPUs, in order of preference.
        pools: Names of pools, in order of preference. Without both, a run may use any pool with GPUs.

    Raises:
        UsageError: The stack has no such pool, or it can't have a node.
    """
    by_pool = kinds_by_pool(info)
    chosen: list[str] = []
    for name in gpus:
        found = [pool for pool, kinds in by_pool.items() if _same(info["groups"][kinds[0]]["gpu"], name)]
        if not found:
            raise UsageError(f"--gpu: {name!r} is not a GPU of this stack; it has {describe(info)}")
        chosen += found
    for name in pools:
        if name not in by_pool:
            raise UsageError(f"--pool: {name!r} is not a pool of this stack; it has {describe(info)}")
        chosen.append(name)
    if not (gpus or pools):
        chosen = [pool for pool, kinds in by_pool.items() if info["groups"][kinds[0]]["gpu"]]
    kinds = [kind for pool in dict.fromkeys(chosen) for kind in by_pool[pool]]
    useful = [kind for kind in kinds if info["groups"][kind]["max"]]
    if kinds and not useful and (gpus or pools):
        option, names = ("--gpu", gpus) if gpus else ("--pool", pools)
        raise UsageError(f"{option}: {','.join(names)!r} can't have a node (its maximum is 0); raise it and pulumi up")
    return useful


def describe(info: ClusterInfo) -> str:
    """Return the pools in words: `default (4 x g5.xlarge: A10G) and h100 (2 x p5.48xlarge: 8 x H100)`."""
    texts = []
    for pool, kinds in kinds_by_pool(info).items():
        group = info["groups"][kinds[0]]
        gpus = gpus_of(group)
        each = f"{gpus} x {group['gpu']}" if gpus > 1 else group["gpu"] or counted(group["units"], "CPU")
        types = f"{' or '.join(group['types'])}: " if group["types"] else ""
        texts.append(f"{pool} ({group['max']} x {types}{each})")
    return " and ".join(texts) or "no pools"


def kind_of_node(labels: Mapping[str, str], info: ClusterInfo) -> str | None:
    """Return the kind of a node by its labels; None if it belongs to no pool of the stack."""
    label = labels.get(NODE_GROUP_LABEL, "")
    kinds = [kind for kind, group in info["groups"].items() if label_of_pool(group["pool"]) == label]
    here = [kind for kind in kinds if labels.get(ZONE_LABEL) in info["groups"][kind]["zones"]]
    return next(iter([*here, *kinds]), None)


def selector(kind: str, info: ClusterInfo) -> dict[str, str]:
    """Return the label selector of the nodes of a kind, as Ray takes it; empty if all nodes with GPUs are of it."""
    own = info["groups"][kind]
    label = label_of_pool(own["pool"])
    selected = {NODE_GROUP_LABEL: label} if label else {}
    others = [label_of_pool(pool) for pool in kinds_by_pool(info) if pool != own["pool"]]
    if not label and others:
        selected = {NODE_GROUP_LABEL: f"!in({','.join(others)})"}
    if len(kinds_by_pool(info)[own["pool"]]) > 1:
        selected[ZONE_LABEL] = own["zones"][0]
    return selected


def kind_of_request(request: Request, info: ClusterInfo) -> str | None:
    """Return the kind of node that is to be started for a request: the first that fits it; None if none does."""
    fitting = [kind for kind, group in info["groups"].items() if _fits(request, group)]
    useful = [kind for kind in fitting if info["groups"][kind]["max"]]
    if not request.resources.get("GPU"):  # nodes without GPUs are cheaper
        useful.sort(key=lambda kind: bool(info["groups"][kind]["gpu"]))
    return next(iter([*useful, *fitting]), None)


def _fits(request: Request, group: NodeGroup) -> bool:
    wanted = request.resources.get("GPU", 0)
    if wanted > gpus_of(group):
        return False
    names = [name.removeprefix(GPU_RESOURCE) for name in request.resources if name.startswith(GPU_RESOURCE)]
    if not all(_same(group["gpu"], name) for name in names):
        return False
    return all(_holds(condition, group) for condition in request.conditions)


def _holds(condition: Condition, group: NodeGroup) -> bool:
    """Return whether some node of a group can meet a condition; labels of others than this project are not known."""
    labels: dict[str, Sequence[str]] = {
        NODE_GROUP_LABEL: [label_of_pool(group["pool"])],
        ZONE_LABEL: group["zones"],
        TYPE_LABEL: group["types"],
        GPU_LABEL: group["gpu"].split(" or "),
    }
    values = labels.get(condition.label)
    if values is None:
        return True
    return any((value in condition.values) != condition.is_not for value in values)


def _same(gpu: str, name: str) -> bool:
    return bool(gpu) and gpu.replace(" ", "-").casefold() == name.replace(" ", "-").casefold()


def siblings(kind: str, info: ClusterInfo) -> Iterator[str]:
    """Yield the other kinds of a kind's pool, which are in other zones."""
    yield from (other for other in kinds_by_pool(info)[info["groups"][kind]["pool"]] if other != kind)
