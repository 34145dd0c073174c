"""Seconds of a preview's look-ups when AWS takes 100 ms for a request: one after another, and at the same time.

usage: python -m bench.preview [SECONDS]   (of a request; 0.1 by default)

The answers are those of tests/infra/fake_aws.py; Pulumi's engine and the start of its providers are not included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any
from unittest import mock

import pulumi

from infra.config import RayClusterArgs, together
from infra.config.plan import make_plan
from tests.infra.fake_aws import CLUSTER, Cloud
from tests.infra.stacks import EVERYTHING

POOLS = {
    "h100": {"instanceTypes": ["p5.48xlarge"], "max": 2},
    "l40s": {"instanceTypes": ["g6e.xlarge", "g6e.2xlarge"], "max": 4, "spot": True},
}
STACKS = {
    "default": {},
    "everything": EVERYTHING,
    "everything, and two pools": {**EVERYTHING, "workerPools": json.dumps(POOLS)},
}
# Requests of the AWS provider (5.100) for a function, where it is not one.
REQUESTS = {
    "getRegion": 0,
    "getPartition": 0,
    "getDefaultTags": 0,
    "getAmi": 2,
    "getPolicy": 2,
    "getServiceQuota": 2,
}
NO_LIMIT = dict.fromkeys(("L-417A185B", "L-DB2E81BA", "L-1216C47A", "L-3819A6DF", "L-34B43A08"), 1e6)
TYPES = ("m5.large", "g5.xlarge", "g6.xlarge", "c6i.2xlarge", "p5.48xlarge", "g6e.xlarge", "g6e.2xlarge")
PRICES = dict.fromkeys(TYPES, 1.0)


class SlowCloud(Cloud):
    """An account that takes some seconds for each request."""

    seconds = 0.1

    def call(self, args: Any) -> Any:
        """Answer a function of the provider."""
        time.sleep(self.seconds * REQUESTS.get(args.token.rpartition(":")[2], 1))
        return super().call(args)

    def get_products(self, ServiceCode: str, Filters: list[dict[str, str]]) -> Any:
        """Answer boto3."""
        time.sleep(self.seconds)
        return super().get_products(ServiceCode, Filters)

    def describe_spot_price_history(self, **asked: Any) -> Any:
        """Answer boto3."""
        time.sleep(self.seconds)
        return super().describe_spot_price_history(**asked)


def measure(config: dict[str, str]) -> float:
    """Seconds of the plan of a stack with this configuration."""
    cloud = SlowCloud(config=config, quotas=NO_LIMIT, prices=PRICES, spot_prices=PRICES)

    def plan() -> float:
        began = time.monotonic()
        make_plan(RayClusterArgs.from_config(), CLUSTER)
        return time.monotonic() - began

    with mock.patch.object(pulumi.log, "warn"):
        return cloud.run(plan)


def main() -> None:
    """Print a line for each stack."""
    SlowCloud.seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SlowCloud.seconds
    print(f"look-ups at {SlowCloud.seconds:g} s a request, on {os.cpu_count()} cores")
    measure({})  # imports
    for name, config in STACKS.items():
        with mock.patch.object(together, "AT_ONCE", 1):
            before = measure(config)
        after = measure(config)
        print(f"{name}: {before:.1f} s one after another, {after:.1f} s at the same time, {before / after:.1f} times")


if __name__ == "__main__":
    main()
