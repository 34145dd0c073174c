"""The SSM parameter in which the stack describes its workers, for runs and for `ray-on-ecs`."""

from __future__ import annotations

import json
import os
from typing import Any, TypedDict

from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE

CONNECT_SECONDS = 2
READ_SECONDS = 3
ATTEMPTS = 2


class Zone(TypedDict):
    """Where the workers may be: an availability zone, its subnet and, if there is one, its placement group."""

    zone: str
    subnet_id: str
    placement_group: str | None


class Scaling(TypedDict):
    """Number of nodes of a kind.

    Attributes:
        min: The idle stop leaves this many.
        max: Jobs can request this many.
        idle_minutes: Idle time before the stop; 0 for never.
    """

    min: int
    max: int
    idle_minutes: int


class ClusterInfo(TypedDict):
    """The workers as the stack has them.

    Attributes:
        group: Their Auto Scaling group.
        types: The instance types that it may start, the preferred one first.
        zones: The zones that they may be in, the preferred one first.
        spot: Whether it starts spot instances.
        spread: Whether the workers of one job may be in several zones.
        prices: Dollars an hour on demand, by instance type; None if the stack knows none.
        head_usd: What the head's instance costs, in dollars an hour, or None.
        scaling: By kind of node, `workers` and, if there can be any, `cpu-workers`.
        gpus: The GPUs of each instance.
    """

    group: str
    types: list[str]
    zones: list[Zone]
    spot: bool
    spread: bool
    prices: dict[str, float] | None
    head_usd: float | None
    scaling: dict[str, Scaling]
    gpus: int


def read_cluster_info() -> ClusterInfo | None:
    """Return what the stack says, or None where there is no stack or its parameter can't be read: a run goes on."""
    if not (name := os.environ.get(CLUSTER_INFO_VARIABLE)):
        return None
    found = ask_aws("ssm", "get_parameter", Name=name)
    return parse_cluster_info(found["Parameter"]["Value"]) if found else None


def ask_aws(service: str, method: str, **arguments: Any) -> Any:
    """Return AWS's answer, or None where it doesn't answer within some seconds or refuses: a run goes on."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    retries = {"total_max_attempts": ATTEMPTS}
    config = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    try:
        return getattr(boto3.client(service, config=config), method)(**arguments)
    except (BotoCoreError, ClientError):
        return None


def parse_cluster_info(text: str) -> ClusterInfo | None:
    """Return what the parameter says, or None if it is not what a stack writes."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    is_complete = isinstance(document, dict) and ClusterInfo.__required_keys__ <= document.keys()
    return document if is_complete else None
