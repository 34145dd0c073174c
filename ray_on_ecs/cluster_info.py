"""Cluster info: the SSM parameter with the stack's description of its workers, and their current spot prices."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Hashable
from datetime import UTC, datetime
from typing import Any, TypedDict

from ray_on_ecs.aws import client, translated
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import TrainingError

LIMITS = {"connect_seconds": 2, "read_seconds": 3, "attempts": 2}
# A run asks every few seconds, and sees a changed stack within a minute. AWS is asked sooner if it has never answered.
READ_SECONDS, RETRY_SECONDS = 60.0, 30.0
# AWS's answers by question, and the times (monotonic) of the next requests.
_answers: dict[Hashable, tuple[Any, float]] = {}


class Zone(TypedDict):
    """Availability zone of workers, with its subnet and, if there is one, its placement group."""

    zone: str
    subnet_id: str
    placement_group: str | None


class Scaling(TypedDict):
    """Limits of the number of nodes of a kind, and the idle time before the scale-in to the minimum; 0 for never.

    A head of this version also reads GPUs or CPUs per node, and the names of Auto Scaling group and capacity provider.
    """

    min: int
    max: int
    idle_minutes: int
    units: int
    group: str
    provider: str


class _Added(TypedDict, total=False):
    """Keys that a stack of an earlier version does not have."""

    default_gpus: int  # of a run that does not say how many workers it wants
    disk_usd: float  # of a worker's disk an hour, in `prices`, which EC2's spot prices are without
    cluster: str  # name of the ECS cluster


class ClusterInfo(_Added):
    """Workers of the stack."""

    group: str  # their Auto Scaling group
    types: list[str]  # that it may start, the preferred one first
    zones: list[Zone]  # that it may use, the preferred one first
    spot: bool
    spread: bool  # the workers of one job may be in several zones
    prices: dict[str, float] | None  # on demand in dollars an hour, by type; None if the stack doesn't know them
    head_usd: float | None
    scaling: dict[str, Scaling]  # by kind of node: `workers` and, if the stack can have them, `cpu-workers`
    gpus: int  # per instance


def read_cluster_info() -> ClusterInfo | None:
    """Return the recent cluster info; None outside a stack, or if it can't be read, as a run does not depend on it."""
    name = os.environ.get(CLUSTER_INFO_VARIABLE)
    if not name:
        return None

    def read() -> ClusterInfo | None:
        response = ask_aws("ssm", "get_parameter", Name=name)
        return parse_cluster_info(response["Parameter"]["Value"]) if response else None

    return recent((CLUSTER_INFO_VARIABLE, name), read, READ_SECONDS)


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
        document = json.loads(text)
    except ValueError:
        return None
    is_complete = isinstance(document, dict) and ClusterInfo.__required_keys__ <= document.keys()
    return document if is_complete else None


def spot_question(info: ClusterInfo, instance_types: Collection[str] | None = None) -> dict[str, Any]:
    """Return the arguments of EC2's DescribeSpotPriceHistory, for these types or all of the workers'."""
    return {
        "InstanceTypes": sorted(instance_types or info["types"]),
        "ProductDescriptions": ["Linux/UNIX"],
        "Filters": [{"Name": "availability-zone", "Values": [zone["zone"] for zone in info["zones"]]}],
        # With the current time EC2 returns the current prices.
        "StartTime": datetime.now(UTC),
    }


def spot_prices(answer: dict[str, Any], info: ClusterInfo) -> dict[str, float]:
    """Return dollars an hour by type with its disk, in the most expensive zone; types without a price are missing."""
    prices: dict[str, float] = {}
    for entry in answer["SpotPriceHistory"]:
        instance_type = entry["InstanceType"]
        price = float(entry["SpotPrice"]) + info.get("disk_usd", 0.0)
        prices[instance_type] = max(price, prices.get(instance_type, 0.0))
    return prices
