"""Pools of workers and their node groups: which of them a run may use, a Ray node belongs to, or a request is for.

A pool is a set of equal instances; it has a node group in each of its zones, which is a kind of node. Functions without
side effects, for head, runs and command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import (
    INSTANCE_LABELS,
    NODE_GROUP_LABEL,
    ON_DEMAND,
    SETTINGS,
    SPOT,
    field_of,
    key_of,
    label_of_pool,
)
from ray_on_ecs.errors import UsageError, counted

ZONE_LABEL, TYPE_LABEL = INSTANCE_LABELS["zone"], INSTANCE_LABELS["instance_type"]
MARKET_LABEL = INSTANCE_LABELS["market"]
# Ray's label of a node's GPU, and the prefix of its resource with the same name.
# https://docs.ray.io/en/latest/ray-core/scheduling/accelerators.html
GPU_LABEL, GPU_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


@dataclass(frozen=True)
class Condition:
    """Condition of a label selector: the label has one of the values, or none of them with `is_not`."""

    label: str
    values: tuple[str, ...]
    is_not: bool = False


@dataclass(frozen=True)
class Request:
    """Resources that a program waits for on one node, with its conditions on the node's labels.

    `fallbacks` has other conditions that the program accepts, in order, where no node meets these.
    """

    resources: Mapping[str, float]
    conditions: tuple[Condition, ...] = ()
    fallbacks: tuple[tuple[Condition, ...], ...] = ()

    def __str__(self) -> str:
        resources = (f"{amount:g} {name}" for name in ("GPU", "CPU") if (amount := self.resources.get(name)))
        gpus = (name.removeprefix(GPU_RESOURCE) for name in self.resources if name.startswith(GPU_RESOURCE))
        labels = (
            f"{each.label} {'not ' if each.is_not else ''}in ({', '.join(sorted(each.values))})"
            for each in self.conditions
        )
        return " and ".join(filter(None, [", ".join(resources), *gpus, *labels]))


def kinds_by_pool(info: ClusterInfo) -> dict[str, list[str]]:
    """Return the kinds of each pool, in the order in which runs that do not choose try them.

    The pools `default` and `cpu` come first, then the others by the price of a node on demand: the cheapest first, and
    last those whose price is not known; then by name. Reserved instances, which are paid for anyway, cost nothing here.
    """
    pools: dict[str, list[str]] = {}
    for kind, group in info["groups"].items():
        pools.setdefault(group["pool"], []).append(kind)
    prices, own = info["prices"] or {}, [*SETTINGS]

    def rank(pool: str) -> tuple[int, float, str]:
        group = info["groups"][pools[pool][0]]
        usd = max((prices.get(name, math.inf) for name in group["types"]), default=math.inf)
        usd = 0.0 if "reservation" in group else usd
        return (own.index(pool) if pool in own else len(own), usd, pool)

    return {pool: pools[pool] for pool in sorted(pools, key=rank)}


def setting(pool: str, key: str) -> str:
    """Return the configuration key of a pool's value, such as `maxWorkers` or `workerPools.h100.max` for `max`."""
    return key_of(field_of(pool, key))


def gpus_of(group: NodeGroup) -> int:
    """Return the GPUs of each of the nodes."""
    return group["units"] if group["gpu"] else 0


def instances_for(workers: int, group: NodeGroup, *, use_gpu: bool) -> int:
    """Return the number of instances that have room for so many workers, one for each GPU or CPU.

    The CPUs of instances with GPUs are not known; one is taken to have enough.
    """
    per_instance = group["units"] if use_gpu or not group["gpu"] else workers
    return math.ceil(workers / (per_instance or 1))


def candidates(info: ClusterInfo, *, gpus: Sequence[str] = (), pools: Sequence[str] = ()) -> list[str]:
    """Return the kinds of node that a run may use, in the order in which it tries them.

    Args:
        info: The stack's workers.
        gpus: Names of GPUs, in order of preference.
        pools: Names of pools, in order of preference. Without both, a run may use any pool with GPUs; see
            `kinds_by_pool` for their order.

    Raises:
        UsageError: The stack has no such pool, or the pool can't have a node.
    """
    by_pool = kinds_by_pool(info)
    names_of = {pool: info["groups"][kinds[0]]["gpu"] for pool, kinds in by_pool.items()}
    chosen: list[str] = []
    for name in gpus:
        found = [pool for pool, gpu in names_of.items() if gpu and _plain(gpu) == _plain(name)]
        mixed = [pool for pool, gpu in names_of.items() if gpu and _plain(name) in map(_plain, gpu.split(" or "))]
        if mixed and not found:
            has = f"the instances of pool {mixed[0]} have {names_of[mixed[0]]}"
            raise UsageError(f"--gpu: {name!r} can't be chosen alone, as {has}; give --pool {mixed[0]} for either")
        if not found:
            raise _unknown("--gpu", name, "GPU", filter(None, names_of.values()), info)
        chosen += found
    for name in pools:
        if name not in by_pool:
            raise _unknown("--pool", name, "pool", by_pool, info)
        chosen.append(name)
    if not (gpus or pools):
        chosen = [pool for pool, gpu in names_of.items() if gpu]
    kinds = [kind for pool in dict.fromkeys(chosen) for kind in by_pool[pool]]
    useful = [kind for kind in kinds if info["groups"][kind]["max"]]
    if kinds and not useful and (gpus or pools):
        option, names = ("--gpu", gpus) if gpus else ("--pool", pools)
        keys = listed([setting(pool, "max") for pool in dict.fromkeys(chosen)], "or")
        raise UsageError(f"{option}: {','.join(names)!r} can't have a node; raise {keys}, which is 0, and pulumi up")
    return useful


def _unknown(option: str, name: str, noun: str, known: Iterable[str], info: ClusterInfo) -> UsageError:
    by_plain = {_plain(each): each for each in known}
    close = get_close_matches(_plain(name), by_plain, n=1)
    hint = f"did you mean {by_plain[close[0]]}? " if close else ""
    return UsageError(f"{option}: {name!r} is not a {noun} of this stack; {hint}it has {describe(info)}")


def describe(info: ClusterInfo) -> str:
    """Return the pools in words: `default (4 x g5.xlarge: A10G) and h100 (2 x p5.48xlarge: 8 x H100)`."""
    texts = []
    for pool, kinds in kinds_by_pool(info).items():
        group = info["groups"][kinds[0]]
        gpus = gpus_of(group)
        each = f"{gpus} x {group['gpu']}" if gpus > 1 else group["gpu"] or counted(group["units"], "CPU")
        texts.append(f"{pool} ({group['max']} x {' or '.join(group['types'])}: {each})")
    return listed(texts) or "no pools"


def listed(names: Sequence[str], word: str = "and") -> str:
    """Return names in words: `a, b and c`."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def kind_of_node(labels: Mapping[str, str], info: ClusterInfo) -> str | None:
    """Return the kind of a node by its labels; None if it is of no pool of the stack, or in none of its zones.

    A node without its zone counts as the pool's first kind.
    """
    label, zone = labels.get(NODE_GROUP_LABEL, ""), labels.get(ZONE_LABEL)
    kinds = [kind for kind, group in info["groups"].items() if label_of_pool(group["pool"]) == label]
    return next((kind for kind in kinds if zone is None or zone in info["groups"][kind]["zones"]), None)


def selector(kind: str, info: ClusterInfo) -> dict[str, str]:
    """Return the label selector of the nodes of a kind, as Ray takes it; empty if all nodes of the stack are of it."""
    own = info["groups"][kind]
    label = label_of_pool(own["pool"])
    selected = {NODE_GROUP_LABEL: label} if label else {}
    others = sorted({label_of_pool(group["pool"]) for group in info["groups"].values()} - {label})
    if not label and others:
        selected = {NODE_GROUP_LABEL: f"!in({','.join(others)})"}
    if any(siblings(kind, info)):
        selected[ZONE_LABEL] = own["zones"][0]
    return selected


def kind_of_request(request: Request, info: ClusterInfo) -> str | None:
    """Return the kind of node that is to be started for a request; None if none fits it."""
    return next(iter(kinds_of_request(request, info)), None)


def kinds_of_request(request: Request, info: ClusterInfo) -> list[str]:
    """Return the kinds of node that fit a request, the one that is to be started first.

    The first of its conditions and their fallbacks decides that some node can meet, those of pools without a maximum
    last. Nodes without GPUs are preferred where they do, as they are cheaper, then pools in their order.
    """
    groups = {kind: info["groups"][kind] for kinds in kinds_by_pool(info).values() for kind in kinds}
    options = [
        [kind for kind, group in groups.items() if _fits(request.resources, conditions, group)]
        for conditions in (request.conditions, *request.fallbacks)
    ]
    can_start = [[kind for kind in option if groups[kind]["max"]] for option in options]
    chosen = next(filter(None, [*can_start, *options]), [])
    cpus = 0 if request.resources.get("GPU") else request.resources.get("CPU", 0)

    def cost(kind: str) -> tuple[bool, bool]:
        has_gpus = bool(groups[kind]["gpu"])
        return has_gpus, not has_gpus and cpus > groups[kind]["units"]

    return chosen if request.resources.get("GPU") else sorted(chosen, key=cost)


def _fits(resources: Mapping[str, float], conditions: Iterable[Condition], group: NodeGroup) -> bool:
    if resources.get("GPU", 0) > gpus_of(group):
        return False
    gpus = (name.removeprefix(GPU_RESOURCE) for name in resources if name.startswith(GPU_RESOURCE))
    of_gpu = (Condition(GPU_LABEL, (name,)) for name in gpus)
    return all(_holds(condition, group) for condition in (*conditions, *of_gpu))


def _holds(condition: Condition, group: NodeGroup) -> bool:
    """Return True if some node of a group can meet a condition; a label that is not known may have any value.

    A node without a label meets no `in` and each `not in`.
    """
    known: dict[str, Sequence[str]] = {
        NODE_GROUP_LABEL: [label_of_pool(group["pool"])],
        ZONE_LABEL: group["zones"],
        TYPE_LABEL: group["types"],
        MARKET_LABEL: [SPOT, ON_DEMAND] if group["spot"] else [ON_DEMAND],
        GPU_LABEL: ray_names(group["gpu"]),
    }
    values = known.get(condition.label)
    return not values or any((value in condition.values) != condition.is_not for value in values)


def ray_names(gpu: str) -> list[str]:
    """Return Ray's names of a GPU that EC2 names, e.g. RTX-PRO-6000 of `RTX PRO Server 6000`.

    Ray reads a name in capitals from the driver's; its names of memory sizes, A100-40G and A100-80G, are not on nodes.
    """
    return ["-".join(word for word in name.split() if word != "Server").upper() for name in gpu.split(" or ")]


def _plain(gpu: str) -> str:
    """Return a GPU's name as users may write it: in any case, with Ray's hyphens or EC2's spaces."""
    return "-".join(word for word in gpu.casefold().replace("-", " ").split() if word != "server")


def siblings(kind: str, info: ClusterInfo) -> Iterator[str]:
    """Yield the other kinds of a kind's pool, which are in other zones."""
    pool = info["groups"][kind]["pool"]
    yield from (other for other, group in info["groups"].items() if group["pool"] == pool and other != kind)
