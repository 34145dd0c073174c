"""Cost of a month training, idle and asleep, by part and in words, and unknown prices."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from infra.config import RayClusterArgs, idle_cost
from infra.config.idle_cost import END
from infra.config.plan import Plan, make_plan
from ray_on_ecs.contract import HOURS_OF_MONTH
from tests.infra.fake_aws import CLUSTER, DIGEST, Cloud

WORKER = 1.022
POOL = {"instance_types": ("g5.xlarge",), "max": 3}
# Settings of each axis, and USD per month by part that they cost; a part of `awake` ends while the head sleeps.
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, float], dict[str, float]]] = {
    "gateway": ({}, {}, {"NAT gateway": 0.05 * 730}),
    "instance": ({"nat_instance": True}, {"NAT instance": (0.0042 + 0.005) * 730, "disks": 30 * 0.08}, {}),
    "endpoints": ({"nat_gateway": False}, {}, {"VPC endpoints": 0.1 * 730}),
    "endpoints of two zones": (
        {"nat_gateway": False, "availability_zones": ("us-west-2a", "us-west-2b")}, {}, {"VPC endpoints": 0.2 * 730},
    ),
    "existing": ({"vpc_id": "vpc-0a1b", "subnet_ids": ("subnet-0c2d",)}, {}, {}),
}  # fmt: skip
POOLS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"worker_count": 0},
    "none at first": {"worker_count": 0, "max_workers": 2},
    "another pool": {"worker_pools": {"more": POOL}},
    "CPUs": {"cpu_worker_instance_types": ("c6i.2xlarge",), "max_cpu_workers": 2},
    "no idle stop": {"worker_count": 1, "idle_timeout_minutes": 0},
    "a minimum": {"worker_count": 2, "min_workers": 1, "worker_pools": {"more": POOL | {"min": 3}}},
}
PARTS = {"Storage": "disks", "NAT Gateway": "NAT gateway", "VpcEndpoint": "VPC endpoints", "t4g.nano": "NAT instance"}


def plan(cloud: Cloud, **settings: Any) -> Plan:
    """The plan of settings, which are otherwise the defaults."""
    return cloud.run(lambda: make_plan(RayClusterArgs(check_quotas=False, **settings), CLUSTER))


def cloudwatch(plan: Plan, *, sleeps: bool, nat: bool, asleep: bool = False) -> float:
    """USD per month of alarms, dashboard and, while the head is up, metrics."""
    kinds = [(scale, plan.nodes[kind].task.gpus > 0) for kind, scale in plan.scales.items() if scale.max_count]
    stop = [gpus for scale, gpus in kinds if scale.idle_minutes and scale.min_count < scale.max_count]
    watched = 2 + 5 * len(kinds) + sum(7 + gpus for gpus in stop) + 3 * sleeps + 6 * (sleeps and nat)
    alarms = 0.1 * watched + 0.3 * sleeps + 3
    with_tasks = [gpus for scale, gpus in kinds if (scale.min_count if scale.idle_minutes else scale.initial_count)]
    metrics = 11 + 21 * (1 + len(with_tasks)) + sum(4 + gpus for _, gpus in kinds) + 2 * any(with_tasks) + sleeps
    return alarms if asleep else alarms + 0.3 * metrics


def of_month(parts: idle_cost.Parts | None) -> dict[str, float | None]:
    """USD per month."""
    return {part: usd and usd * HOURS_OF_MONTH for part, usd in (parts or {}).items()}


def combinations() -> list[tuple[int, str, str, str]]:
    """Settings that fit: a head sleeps only if all workers stop, and without internet access the image is in ECR."""
    every = itertools.product((0, 60), NETWORKS, POOLS, ("", f"public.example/ray@{DIGEST}"))
    return [
        case
        for case in every
        if not (case[0] and case[2] in ("no idle stop", "a minimum")) and not (case[3] and "endpoints" in case[1])
    ]


@pytest.mark.parametrize(("minutes", "network", "pools", "image"), combinations())
def test_parts_awake_and_asleep_follow_the_settings(
    cloud: Cloud, minutes: int, network: str, pools: str, image: str
) -> None:
    settings, awake, always = NETWORKS[network]
    cluster = plan(cloud, **POOLS[pools], **settings, sleep_after_minutes=minutes, image_uri=image)
    assert cluster.costs
    sleeps, nat = minutes > 0, "NAT instance" in awake
    stays = always | {"service discovery": 0.5} | ({} if image else {"image": 0.33})
    head = max(price.on_demand for price in (cluster.nodes["head"].prices or {}).values()) * 730
    up = {"head": head, **awake, "disks": 8.0 + awake.get("disks", 0.0)}
    expected = {**stays, **up, "CloudWatch": cloudwatch(cluster, sleeps=sleeps, nat=nat)}
    assert of_month(cluster.costs.idle) == pytest.approx(expected, abs=0.001)
    if sleeps:
        expected = {**stays, "CloudWatch": cloudwatch(cluster, sleeps=True, nat=nat, asleep=True)}
        assert of_month(cluster.costs.asleep) == pytest.approx(expected, abs=0.001)
    else:
        assert cluster.costs.asleep is None


@pytest.mark.parametrize("minutes", [0, 60], ids=["always on", "sleeps"])
@pytest.mark.parametrize("network", NETWORKS)
def test_each_line_has_its_parts_and_their_sum(cloud: Cloud, minutes: int, network: str) -> None:
    cluster = plan(cloud, **NETWORKS[network][0], sleep_after_minutes=minutes)
    totals = [months(line) for line in idle_cost.lines(cluster.costs, cluster.nodes, cluster.scales)]
    totals = [month for month in totals if month]
    assert [state for state, _, _ in totals] == ["training", "idle", *(["asleep"] if minutes else [])]
    for state, total, parts in totals:
        assert total == pytest.approx(math.fsum(parts.values()), abs=0.001), state
    (_, _, training), (_, _, idle), *_ = totals
    assert training.keys() - idle.keys() == {"2 x g5.xlarge"}
    assert training["2 x g5.xlarge"] == pytest.approx(2 * WORKER * 730, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "workers", "started"),
    [
        ({"worker_count": 0, "max_workers": 2}, [], []),
        ({"worker_count": 0}, [], []),
        ({"worker_count": 2, "min_workers": 2}, ["2 x g5.xlarge 1,492.12"], []),
        (
            {"worker_count": 3, "min_workers": 1},
            ["1 x g5.xlarge 746.06"],
            ["2 x g5.xlarge (2.04 USD an hour) until idle for 30 minutes"],
        ),
        ({"worker_count": 2, "min_workers": 1, "idle_timeout_minutes": 0}, ["2 x g5.xlarge 1,492.12"], []),
        ({"worker_count": 2, "min_workers": 2, "spot": True}, ["2 x g5.xlarge at most 1,492.12"], []),
        (
            {"worker_count": 1, "spot": True, "idle_timeout_minutes": 60},
            [],
            ["1 x g5.xlarge at most (1.02 USD an hour) until idle for 60 minutes"],
        ),
        (
            {"worker_count": 0, "max_workers": 1, "worker_pools": {"a": POOL | {"min": 2}, "b": POOL | {"min": 2}}},
            ["2 x g5.xlarge 1,492.12", "2 x g5.xlarge 1,492.12"],
            [],
        ),
        (
            {"worker_count": 0, "max_workers": 1, "worker_pools": {"more": POOL | {"initial": 1}}},
            [],
            ["1 x g5.xlarge (1.02 USD an hour) until idle for 30 minutes"],
        ),
        # The minimum is in the first of a pool's zones.
        (
            {"worker_count": 1, "min_workers": 1, "availability_zones": ("us-west-2a", "us-west-2b")},
            ["1 x g5.xlarge 746.06"],
            [],
        ),
    ],
    ids=[
        "none at first", "none", "minimum", "minimum and more", "no idle stop", "minimum on spot", "on spot",
        "pools with a minimum", "pool with workers at first", "two zones",
    ],
)  # fmt: skip
def test_workers_that_stay_are_in_the_idle_month(
    cloud: Cloud, settings: dict[str, Any], workers: list[str], started: list[str]
) -> None:
    cluster = plan(cloud, **settings)
    *_, idle = (line for line in cluster.idle_cost.split("; ") if line.startswith("month idle"))
    assert idle.partition(" + service discovery 0.50")[2] == "".join(f" + {part}" for part in workers)
    begin = "the first `pulumi up` also starts "
    assert [line.removeprefix(begin) for line in cluster.idle_cost.split("; ") if line.startswith(begin)] == started
    assert cluster.idle_cost.endswith(f"; {END}")


def test_only_a_stack_that_can_train_has_a_training_month(cloud: Cloud) -> None:
    for settings, count in (({}, 2), ({"worker_count": 0, "max_workers": 3}, 3), ({"worker_count": 0}, 0)):
        cluster = plan(cloud, **settings)
        training = [
            line for line in idle_cost.lines(cluster.costs, cluster.nodes, cluster.scales) if "month training" in line
        ]
        assert [line.rpartition(" + ")[2] for line in training] == (
            [f"{count} x g5.xlarge {count * 746.06:,.2f}"] if count else []
        )


@pytest.mark.parametrize(
    ("settings", "usd"),
    [({}, 6.9), ({"worker_pools": {"more": POOL | {"min": 1}}}, 6.3), ({"min_workers": 1}, 0.0)],
    ids=["first GPUs", "other GPUs stay", "its own stay"],
)
def test_training_adds_the_metrics_of_its_service(cloud: Cloud, settings: dict[str, Any], usd: float) -> None:
    cluster = plan(cloud, **settings)
    totals = [months(line) for line in idle_cost.lines(cluster.costs, cluster.nodes, cluster.scales)]
    (_, _, training), (_, _, idle) = [month for month in totals if month]
    assert training["CloudWatch"] - idle["CloudWatch"] == pytest.approx(usd, abs=0.011)


def test_cost_is_equal_whatever_spot_prices_are(cloud: Cloud) -> None:
    settings = {"spot": True, "min_workers": 1, "max_hourly_usd": 99.0}
    first = plan(cloud, **settings).idle_cost
    cloud.spot_prices = {"g5.xlarge": 0.9}
    assert plan(cloud, **settings).idle_cost == first


@pytest.mark.parametrize("minutes", [0, 60], ids=["always on", "sleeps"])
@pytest.mark.parametrize("network", ["gateway", "instance", "endpoints"])
@pytest.mark.parametrize("product", PARTS)
def test_part_without_a_price_is_named_where_it_costs(
    cloud: Cloud, product: str, network: str, minutes: int, warnings: list[str]
) -> None:
    (cloud.prices if product in (cloud.prices or {}) else cloud.other_prices).pop(product)  # ty: ignore
    cluster = plan(cloud, **NETWORKS[network][0], sleep_after_minutes=minutes)
    assert cluster.costs
    part = PARTS[product]
    assert [name for name, usd in cluster.costs.idle.items() if usd is None] == [part] * (part in cluster.costs.idle)
    assert len(warnings) == (part in cluster.costs.idle)
    for line in idle_cost.lines(cluster.costs, cluster.nodes, cluster.scales):
        if month := months(line):
            parts = cluster.costs.asleep if month[0] == "asleep" else cluster.costs.idle
            is_unknown = part in (parts or {})
            assert (f"{part} of unknown price" in line, ": at least " in line) == (is_unknown, is_unknown)
            assert month[1] == pytest.approx(math.fsum(month[2].values()), abs=0.001)


def test_warning_of_an_unknown_part_names_the_permission(cloud: Cloud, warnings: list[str]) -> None:
    del cloud.other_prices["Storage"]
    plan(cloud)
    [line] = warnings
    assert line.startswith("the idle cost is without disks (pricing:GetProducts: 0 prices of Storage in us-west-2)")


def test_workers_without_a_price_leave_the_other_parts(cloud: Cloud) -> None:
    cloud.prices = {"m5.large": 0.096}
    training, idle, *_ = plan(cloud).idle_cost.split("; ")
    assert training.startswith("month training: at least ")
    assert training.endswith(" + 2 x g5.xlarge of unknown price")
    assert idle.startswith("month idle: ")
    assert "unknown" not in idle


def test_without_prices_the_cost_is_unknown(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = None
    cluster = plan(cloud)
    assert (cluster.costs, cluster.idle_cost) == (None, f"unknown without prices; {END}")
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


def months(line: str) -> tuple[str, float, dict[str, float]] | None:
    """State, sum and parts of a line for a month, without parts of unknown price; None for another line."""
    if not (match := re.fullmatch(r"month (\w+): (?:at least )?([\d,.]+) USD \([\d.]+ an hour\) = (.*)", line)):
        return None
    parts = re.findall(r"(?:^| \+ )([^+]*?)(?: at most)? ([\d,]+\.\d\d)(?= \+ |$)", match[3])
    return match[1], number(match[2]), {part: number(usd) for part, usd in parts}


def number(text: str) -> float:
    return float(text.replace(",", ""))
