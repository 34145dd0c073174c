"""Cost of a stack that no run uses, by part and in words, and unknown prices."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import RayClusterArgs
from infra.config.plan import Plan, make_plan
from ray_on_ecs.contract import HOURS_OF_MONTH
from tests.infra.fake_aws import CLUSTER, Cloud

HEAD, DISK, NAT = 0.2162, round(100 * 0.08 / HOURS_OF_MONTH, 4), 0.05
WORKER = 1.022
END = "`pulumi destroy` ends it"
POOL = {"instance_types": ("g5.xlarge",), "max": 3}


def plan(cloud: Cloud, **settings: Any) -> Plan:
    """The plan of settings, which are otherwise the defaults."""
    return cloud.run(lambda: make_plan(RayClusterArgs(**settings), CLUSTER))


def cloudwatch(kinds: int, with_tasks: int = 1) -> float:
    """The price of metrics, alarms and dashboard."""
    metrics = 11 + 21 * with_tasks + 5 * kinds
    return round((0.3 * metrics + 0.1 * (2 + 13 * kinds) + 3) / HOURS_OF_MONTH, 4)


def test_default_stack_costs_head_network_and_cloudwatch(cloud: Cloud) -> None:
    made = plan(cloud)
    assert made.idle_usd == {"head": HEAD, "its disk": DISK, "NAT gateway": NAT, "CloudWatch": cloudwatch(1)}
    assert made.idle_cost == (
        "0.30 USD an hour (218 a month) while idle: head 0.22, its disk 0.01, NAT gateway 0.05, CloudWatch 0.02; "
        "the first `pulumi up` also starts 2 x g5.xlarge (2.04 USD an hour) until idle for 30 minutes; " + END
    )


@pytest.mark.parametrize(
    ("settings", "parts", "kinds", "with_tasks", "more"),
    [
        ({"worker_count": 0, "max_workers": 2}, "", 1, 1, ""),
        ({"worker_count": 0}, "", 0, 1, ""),
        ({"worker_count": 2, "min_workers": 2}, ", 2 x g5.xlarge 2.04", 1, 2, ""),
        (
            {"worker_count": 3, "min_workers": 1},
            ", 1 x g5.xlarge 1.02",
            1,
            2,
            "the first `pulumi up` also starts 2 x g5.xlarge (2.04 USD an hour) until idle for 30 minutes; ",
        ),
        ({"worker_count": 2, "min_workers": 1, "idle_timeout_minutes": 0}, ", 2 x g5.xlarge 2.04", 1, 2, ""),
        ({"worker_count": 2, "min_workers": 2, "spot": True}, ", 2 x g5.xlarge at most 2.04", 1, 2, ""),
        (
            {"worker_count": 1, "spot": True, "idle_timeout_minutes": 60},
            "",
            1,
            1,
            "the first `pulumi up` also starts 1 x g5.xlarge (at most 1.02 USD an hour) until idle for 60 minutes; ",
        ),
        (
            {"worker_count": 0, "max_workers": 1, "worker_pools": {"a": POOL | {"min": 2}, "b": POOL | {"max": 0}}},
            ", 2 x g5.xlarge 2.04",
            2,
            2,
            "",
        ),
        (
            {"worker_count": 0, "max_workers": 1, "worker_pools": {"more": POOL | {"initial": 1}}},
            "",
            2,
            1,
            "the first `pulumi up` also starts 1 x g5.xlarge (1.02 USD an hour) until idle for 30 minutes; ",
        ),
        # The minimum is in the first of a pool's zones.
        (
            {"worker_count": 1, "min_workers": 1, "availability_zones": ("us-west-2a", "us-west-2b")},
            ", 1 x g5.xlarge 1.02",
            2,
            2,
            "",
        ),
    ],
    ids=[
        "none at first", "none", "minimum", "minimum and more", "no idle stop", "minimum on spot", "on spot",
        "pool with a minimum", "pool with workers at first", "two zones",
    ],
)  # fmt: skip
def test_workers_that_stay_are_in_the_cost(
    cloud: Cloud, settings: dict[str, Any], parts: str, kinds: int, with_tasks: int, more: str
) -> None:
    made = plan(cloud, check_quotas=False, **settings)
    assert made.idle_usd
    assert made.idle_usd["CloudWatch"] == cloudwatch(kinds, with_tasks)
    before, _, rest = made.idle_cost.partition(" CloudWatch ")
    assert rest[4:] == f"{parts}; {more}{END}"
    staying = sum(float(part.split()[-1]) for part in parts.split(", ") if part)
    total = sum(usd for usd in made.idle_usd.values() if usd) + staying
    assert float(before.split()[0]) == pytest.approx(total, abs=0.01)


def test_cost_is_equal_whatever_spot_prices_are(cloud: Cloud) -> None:
    settings = {"spot": True, "min_workers": 1, "max_hourly_usd": 99.0}
    first = plan(cloud, **settings).idle_cost
    cloud.spot_prices = {"g5.xlarge": 0.9}
    assert plan(cloud, **settings).idle_cost == first


@pytest.mark.parametrize(
    ("settings", "network"),
    [
        ({}, {"NAT gateway": NAT}),
        ({"nat_gateway": False}, {"VPC endpoints": 0.1}),
        ({"nat_gateway": False, "availability_zones": ("us-west-2a", "us-west-2b")}, {"VPC endpoints": 0.2}),
        ({"vpc_id": "vpc-0a1b", "subnet_ids": ("subnet-0c2d",)}, {}),
    ],
    ids=["own", "own without NAT", "two zones without NAT", "existing"],
)
def test_network_costs_what_the_stack_creates(
    cloud: Cloud, settings: dict[str, Any], network: dict[str, float]
) -> None:
    idle = plan(cloud, **settings).idle_usd
    assert idle
    assert {part: usd for part, usd in idle.items() if part not in ("head", "its disk", "CloudWatch")} == network


@pytest.mark.parametrize("part", ["Storage", "NAT Gateway"])
def test_part_without_a_price_is_named(cloud: Cloud, part: str, warnings: list[str]) -> None:
    del cloud.other_prices[part]
    made = plan(cloud)
    name = {"Storage": "its disk", "NAT Gateway": "NAT gateway"}[part]
    assert made.idle_usd
    assert [each for each, usd in made.idle_usd.items() if usd is None] == [name]
    assert f"; the price of {name} is unknown; " in made.idle_cost
    [line] = warnings
    assert line.startswith(f"the idle cost is without {name} (pricing:GetProducts: 0 prices of {part} in us-west-2)")


def test_without_prices_the_cost_is_unknown(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = None
    made = plan(cloud)
    assert (made.idle_usd, made.idle_cost) == (None, f"unknown without prices; {END}")
    assert len(warnings) == 1


def test_prices_in_another_currency_are_unknown(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    in_yuan = (
        '{"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"unit": "Hrs", "pricePerUnit": {"CNY": "1"}}}}}}}'
    )
    monkeypatch.setattr(cloud, "get_products", lambda **asked: {"PriceList": [in_yuan]})
    cloud.partition = "aws-cn"
    assert plan(cloud).idle_cost == f"unknown without prices; {END}"
    assert "USD" in warnings[0]
