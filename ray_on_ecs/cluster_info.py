"""Cluster info: the SSM parameter with the stack's description of its workers, and their current spot prices."""

# Without annotations from __future__, with which each key would be one of `__required_keys__`.
import json
import math
import os
import time
from collections.abc import Callable, Collection, Hashable
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from ray_on_ecs.aws import DENIED, Refused, client, translated
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import TrainingError

LIMITS = {"connect_seconds": 2, "read_seconds": 3, "attempts": 2}
# A run asks every few seconds, and sees a changed stack within a minute. AWS is asked sooner if it has never answered.
READ_SECONDS, RETRY_SECONDS = 60.0, 30.0
# AWS's answers by question, and the times (monotonic) of the next requests.
_answers: dict[Hashable, tuple[Any, float]] = {}


class Reserved(TypedDict):
    """Capacity reservation of a node group: its ID, and whether it is a Capacity Block, which is paid up front."""

    id: str
    is_block: bool


class NodeGroup(TypedDict):
    """Workers of one pool in one zone: equal instances, with an Auto Scaling group, a capacity provider and limits."""

    pool: str
    zones: list[str]  # one; with spreadZones several
    types: list[str]  # that it may start, the preferred one first
    gpu: str  # as EC2 names it, e.g. A10G; `A10G or L4` of unlike types, empty without GPUs
    units: int  # GPUs per node, or CPUs without GPUs
    spot: bool
    min: int  # nodes
    max: int
    default_nodes: int  # that a run takes if it does not say how many workers it wants
    idle_minutes: int  # before the scale-in to the minimum; 0 for never
    group: str  # name of the Auto Scaling group
    provider: str  # name of the capacity provider
    disk_usd: float  # part of the types' `prices` that is the disk's; EC2's spot prices are without it
    efa: NotRequired[int]  # EFA interfaces per node; missing without EFA
    reservation: NotRequired[Reserved]  # that has all the instances


class ClusterInfo(TypedDict):
    """Workers of the stack: the parameter's content, which infra/definitions/cluster_info.py makes."""

    cluster: str  # name of the ECS cluster
    # By kind: `workers`, `cpu-workers`, `workers-b` in another zone, `h100-workers`. The groups of one pool share its
    # maximum.
    groups: dict[str, NodeGroup]
    prices: dict[str, float] | None  # on demand in dollars an hour, by type; None if the stack doesn't know them
    head_usd: float | None
    network_gbits: dict[str, float]  # baseline bandwidth by type, where EC2 names it


def read_cluster_info() -> ClusterInfo | None:
    """Return the recent cluster info; None outside a stack, or if it can't be read, as a run does not depend on it."""
    name = os.environ.get(CLUSTER_INFO_VARIABLE)
    if not name:
        return None

    def read() -> ClusterInfo | None:
        response = ask_aws("ssm", "get_parameter", Name=name)
        return parse_cluster_info(response["Parameter"]["Value"]) if response else None

    return recent((CLUSTER_INFO_VARIABLE, name), read, READ_SECONDS)


def is_refused() -> bool:
    """Return True if AWS refuses the cluster info: it does not exist, or this role may not read it."""
    try:
        with translated("ssm"):
            client("ssm", **LIMITS).get_parameter(Name=os.environ.get(CLUSTER_INFO_VARIABLE, ""))
    except Refused as refused:
        return refused.code in {*DENIED, "ParameterNotFound"}
    except TrainingError:
        pass
    return False


def recent(question: Hashable, ask: Callable[[], Any], seconds: float) -> Any:
    """Return an answer of at most `seconds` ago; the last one if AWS has none now."""
    answer, due = _answers.get(question, (None, -math.inf))
    if time.monotonic() >= due:
        found = ask()
        answer = found if found or answer is None else answer
        _answers[question] = (answer, time.monotonic() + (RETRY_SECONDS if answer is None else seconds))
    return answer


def ask_aws(service: str, method: str, **arguments: Any) -> Any:
    """Return AWS's response; None if it refuses or doesn't answer within some seconds."""
    try:
        with translated(service):
            return getattr(client(service, **LIMITS), method)(**arguments)
    except TrainingError:
        return None


def parse_cluster_info(text: str) -> ClusterInfo | None:
    """Return the content of the parameter, or None if it is not complete."""
    try:
        info: Any = json.loads(text)
        is_complete = info.keys() >= ClusterInfo.__required_keys__ and all(map(is_node_group, info["groups"].values()))
    except (AttributeError, ValueError):
        return None
    return info if is_complete else None


def is_node_group(group: Any) -> bool:
    """Return True for a node group of a document that has all keys of NodeGroup."""
    return isinstance(group, dict) and group.keys() >= NodeGroup.__required_keys__


def spot_question(instance_types: Collection[str], zones: Collection[str]) -> dict[str, Any]:
    """Return the arguments of EC2's DescribeSpotPriceHistory for these types in these zones."""
    return {
        "InstanceTypes": sorted(set(instance_types)),
        "ProductDescriptions": ["Linux/UNIX"],
        "Filters": [{"Name": "availability-zone", "Values": sorted(set(zones))}],
        # With the current time EC2 returns the current prices.
        "StartTime": datetime.now(UTC),
    }


def spot_prices(answer: dict[str, Any], disk_usd: float) -> dict[str, float]:
    """Return dollars an hour by type with its disk, in the most expensive zone; types without a price are missing."""
    prices: dict[str, float] = {}
    for entry in answer["SpotPriceHistory"]:
        instance_type = entry["InstanceType"]
        prices[instance_type] = max(float(entry["SpotPrice"]) + disk_usd, prices.get(instance_type, 0.0))
    return prices
