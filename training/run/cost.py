"""What the workers of a run have cost, by the price of an instance that the stack has left in a parameter."""

from __future__ import annotations

import json
import os
from typing import Any, TypedDict

# The name of an SSM parameter that holds {"instance_type": "g5.xlarge", "hourly_usd": 1.006}, or null.
PARAMETER_VARIABLE = "WORKER_PRICE_PARAMETER"
CONNECT_SECONDS = 5
READ_SECONDS = 10
ATTEMPTS = 3


class Cost(TypedDict):
    """What a command's workers have cost.

    Attributes:
        usd: Dollars: the hours by the price. The head, disks and traffic are no part of it.
        instance_hours: The hours of all instances on which the command held a place for a worker.
        instance_type: Their type.
        hourly_usd: The price of one of them, an hour.
    """

    usd: float
    instance_hours: float
    instance_type: str
    hourly_usd: float


def cost_of(instance_hours: float) -> Cost | None:
    """Return the cost of so many hours of a worker's instance, or None where its price is not known."""
    price = _read_price(name) if (name := os.environ.get(PARAMETER_VARIABLE)) else None
    if price is None:
        return None
    return {
        "usd": round(instance_hours * price["hourly_usd"], 4),
        "instance_hours": instance_hours,
        "instance_type": price["instance_type"],
        "hourly_usd": price["hourly_usd"],
    }


def cost_line(cost: Cost | None) -> str:
    """Return what the line at the end of a run says of the cost; empty if it is not known."""
    return f", {cost['usd']:.2f} USD for {cost['instance_hours']:.2f} h of {cost['instance_type']}" if cost else ""


def _read_price(name: str) -> Any:
    """Read the price, or return None if that fails: a result without costs is better than none."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    retries = {"total_max_attempts": ATTEMPTS}
    config = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    try:
        return json.loads(boto3.client("ssm", config=config).get_parameter(Name=name)["Parameter"]["Value"])
    except (BotoCoreError, ClientError, ValueError):
        return None
