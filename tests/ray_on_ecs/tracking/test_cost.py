"""Cost of a run, by the prices that the stack leaves in a parameter, and its totals over all commands."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_on_ecs import cluster_info
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.tracking import cost as cost_module
from ray_on_ecs.tracking.cost import (
    InstanceKind,
    cost_line,
    cost_of,
    earlier_of,
    lines_after_run,
    total_seconds,
    total_usd,
)
from tests.aws import REGION, client
from tests.worker_pools import cpu_group, node_group, workers

NAME = "workers-of-the-tests"
PRICES = {"g5.xlarge": 1.006, "g6.xlarge": 0.8048}
H100 = node_group("h100", "p5.48xlarge", zone=f"{REGION}b", units=8, spot=True, disk_usd=0.5)
PREP = cpu_group("prep", types=["c7i.large"], zone=f"{REGION}b")
OF_POOLS = {"g5.xlarge": 1.006, "p5.48xlarge": 55.04, "c7i.large": 0.09}
POOLS: dict[str, Any] = {"pools": {"h100_workers": H100, "prep_workers": PREP}, "prices": OF_POOLS}
G5 = InstanceKind("g5.xlarge", "on-demand")
G5_SPOT = InstanceKind("g5.xlarge", "spot")
G6 = InstanceKind("g6.xlarge", "on-demand")
G6_SPOT = InstanceKind("g6.xlarge", "spot")
UNLABELLED = InstanceKind()


@pytest.fixture
def put(
    aws_server: str, aws_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Puts the stack's document into the parameter, which is not there before; `changed` are values of its workers."""
    monkeypatch.setattr(cluster_info, "_answers", {})
    monkeypatch.setattr(cluster_info, "LIMITS", {})  # a busy machine takes longer
    for name, value in {**aws_variables, CLUSTER_INFO_VARIABLE: NAME}.items():
        monkeypatch.setenv(name, value)
    ssm = client("ssm", aws_server)

    def put_document(
        text: str | None = None, pools: Any = None, prices: Any = PRICES, head_usd: float | None = 0.192, **changed: Any
    ) -> None:
        own = node_group("default", "g5.xlarge", "g6.xlarge", zone=f"{REGION}a", **changed)
        info = {**workers(workers=own, **(pools or {})), "prices": prices, "head_usd": head_usd}
        ssm.put_parameter(Name=NAME, Type="String", Value=text or json.dumps(info), Overwrite=True)

    yield put_document
    ssm.delete_parameters(Names=[NAME])


def test_cost_is_hours_times_price(put: Callable[..., Any]) -> None:
    put()
    cost = cost_of({G5: 0.5})
    assert cost == {
        "usd": 0.503,
        "on_demand_usd": 0.503,
        "instance_hours": 0.5,
        "instances": [
            {
                **{"pool": "default", "zones": [f"{REGION}a"], "instance_type": "g5.xlarge", "market": "on-demand"},
                **{"hours": 0.5, "hourly_usd": 1.006},
            }
        ],
    }
    assert cost_line(cost) == ", 0.50 USD for 0.50 h of g5.xlarge"


def test_spot_price_is_of_the_workers_zones(put: Callable[..., Any]) -> None:
    put()
    cost = cost_of({G5_SPOT: 1000.0})
    assert cost is not None
    assert cost["instances"][0]["hourly_usd"] == 0.00001
    assert cost["usd"] == 0.01
    put(zones=["us-west-2z"])
    cluster_info._answers.clear()
    assert cost_of({G5_SPOT: 1000.0}) is None


@pytest.mark.parametrize("answer", [None, {"SpotPriceHistory": []}], ids=["refused", "empty"])
def test_last_spot_price_stays_without_an_answer(
    put: Callable[..., Any], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put()
    cost = cost_of({G5_SPOT: 1000.0})
    assert cost
    monkeypatch.setattr(cluster_info.time, "monotonic", lambda: 1e12)
    monkeypatch.setattr(cost_module, "ask_aws", lambda *_, **__: answer)
    assert cost_of({G5_SPOT: 1000.0}) == cost


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """EC2 knows the prices on spot: of one type in two zones, and of another."""
    found = [
        ("g5.xlarge", "a", "0.41"),
        ("g5.xlarge", "b", "0.99"),
        ("p5.48xlarge", "b", "20"),
        ("p5.48xlarge", "a", "9"),
    ]
    entries = [
        {"InstanceType": name, "AvailabilityZone": f"{REGION}{zone}", "SpotPrice": usd} for name, zone, usd in found
    ]
    asked: list[Any] = []

    def ask(service: str, method: str, **question: Any) -> Any:
        asked.append(question["InstanceTypes"])
        return {"SpotPriceHistory": [entry for entry in entries if entry["InstanceType"] in question["InstanceTypes"]]}

    monkeypatch.setattr(cost_module, "ask_aws", ask)
    return asked


@pytest.mark.usefixtures("prices")
def test_each_kind_has_its_own_price(put: Callable[..., Any]) -> None:
    put()
    cost = cost_of({G5_SPOT: 2.0, G6: 0.5})
    assert cost is not None
    assert [
        (instance["instance_type"], instance["market"], instance["hourly_usd"]) for instance in cost["instances"]
    ] == [
        ("g5.xlarge", "spot", 0.41),
        ("g6.xlarge", "on-demand", 0.8048),
    ]
    assert cost["usd"] == pytest.approx(2 * 0.41 + 0.5 * 0.8048)
    assert cost["on_demand_usd"] == pytest.approx(2 * 1.006 + 0.5 * 0.8048)
    assert cost["instance_hours"] == 2.5
    assert cost_line(cost) == (
        ", 1.22 USD for 2.00 h of g5.xlarge on spot and 0.50 h of g6.xlarge (2.41 USD on demand)"
    )


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize(("spot", "kind"), [(True, G5_SPOT), (False, G5)])
def test_unlabelled_instance_is_the_stacks_first_choice(
    spot: bool, kind: InstanceKind, put: Callable[..., Any]
) -> None:
    put(spot=spot)
    cost = cost_of({UNLABELLED: 0.25, kind: 0.75})
    assert cost == cost_of({kind: 1.0})


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize("hours", [{G5: 0.5, G6_SPOT: 0.1}, {G5: 0.5, InstanceKind("p5.48xlarge", "spot"): 0.1}])
def test_missing_price_makes_the_cost_unknown(hours: dict[InstanceKind, float], put: Callable[..., Any]) -> None:
    put()
    assert cost_of(hours) is None


def test_pools_have_prices_of_their_own_zones_types_and_disks(put: Callable[..., Any], prices: list[Any]) -> None:
    put(**POOLS, disk_usd=0.01)
    h100, prep = InstanceKind(kind="h100-workers"), InstanceKind(kind="prep-workers")
    cost = cost_of({G5_SPOT: 2.0, h100: 1.0, prep: 3.0, InstanceKind("p5.48xlarge", "on-demand", "h100-workers"): 0.5})
    assert cost
    assert [
        (instance["pool"], instance["zones"], instance["instance_type"], instance["market"], instance["hourly_usd"])
        for instance in cost["instances"]
    ] == [
        ("default", [f"{REGION}a"], "g5.xlarge", "spot", pytest.approx(0.42)),
        ("h100", [f"{REGION}b"], "p5.48xlarge", "spot", 20.5),
        ("prep", [f"{REGION}b"], "c7i.large", "on-demand", 0.09),
        ("h100", [f"{REGION}b"], "p5.48xlarge", "on-demand", 55.04),
    ]
    assert cost["usd"] == pytest.approx(2 * 0.42 + 20.5 + 3 * 0.09 + 0.5 * 55.04)
    assert prices == [["g5.xlarge", "p5.48xlarge"]], "one question"


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize(
    "instance",
    [
        InstanceKind("g5.xlarge", "spot", "l4-workers"),  # the pool has been removed meanwhile
        InstanceKind("g5.xlarge", "on-demand", "l4-workers"),
        InstanceKind(kind="cpu-workers"),
        InstanceKind("p4d.24xlarge", "spot", "h100-workers"),
    ],
)
def test_instance_of_an_unknown_kind_makes_the_cost_unknown(instance: InstanceKind, put: Callable[..., Any]) -> None:
    put(**POOLS)
    assert cost_of({G5: 1.0, instance: 1.0}) is None


@pytest.mark.parametrize("text", ["null", "no JSON", '{"group": "workers"}', None])
def test_without_prices_it_is_not_known(put: Callable[..., Any], text: str | None) -> None:
    if text is not None:
        put(text)
    assert cost_of({G5: 0.5}) is None
    assert cost_line(None) == ""


def test_unknown_prices_give_no_cost(put: Callable[..., Any]) -> None:
    put(prices=None)
    assert cost_of({G5: 0.5}) is None


def test_no_instance_costs_nothing(put: Callable[..., Any]) -> None:
    put()
    cost = cost_of({})
    assert cost == {"usd": 0, "on_demand_usd": 0, "instance_hours": 0, "instances": []}
    assert cost_line(cost) == ""


def test_run_without_a_stack_asks_no_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    assert cost_of({G5: 0.5}) is None


def status(seconds: int, usd: float | None, earlier: Any = None) -> dict[str, Any]:
    times = {"started": "2026-01-02T03:00:00.000+00:00", "updated": f"2026-01-02T03:00:{seconds:02}.000+00:00"}
    return {**times, "cost_usd": usd, **({"earlier": earlier} if earlier else {})}


def test_each_command_adds_its_own_part() -> None:
    first = status(30, 1.0)
    second = status(20, 0.5, earlier_of(first))
    third = status(10, 0.25, earlier_of(second))
    assert (total_seconds(third, {}), total_usd(third, {})) == (60, 1.75)
    result = {"times": {"total_seconds": 12.0}, "cost": {"usd": 0.3}, "earlier": earlier_of(second)}
    assert (total_seconds(third, result), total_usd(third, result)) == (62, 1.8)


@pytest.mark.parametrize("unknown", [(None, 1.0), (1.0, None)])
def test_unknown_cost_makes_the_total_unknown(unknown: tuple[float | None, float | None]) -> None:
    first, second = unknown
    assert total_usd(status(20, second, earlier_of(status(30, first))), {}) is None


def test_run_before_its_start_has_no_time() -> None:
    assert (total_seconds({}, {}), total_usd({}, {})) == (None, None)
    assert earlier_of(None) == {"seconds": 0.0, "usd": 0.0}


HEAD_LINE = (
    "the head costs 0.19 USD an hour (140 a month), network and CloudWatch are extra; pulumi destroy ends the stack"
)
NEXT = "; run --then-stop stops a run's workers at its end"
H100_SPOT = InstanceKind("p5.48xlarge", "spot", "h100-workers")


@pytest.mark.parametrize(
    ("used", "limits", "line"),
    [
        ({G5: 2}, {}, "2 x g5.xlarge stay idle for some 30 minutes (1.01 USD) unless another run takes them" + NEXT),
        ({G5: 1}, {}, "1 x g5.xlarge stays idle for some 30 minutes (0.50 USD) unless another run takes it" + NEXT),
        (
            {UNLABELLED: 1, G5: 1, G6: 1},
            {"idle_minutes": 60},
            "2 x g5.xlarge and 1 x g6.xlarge stay idle for some 60 minutes (2.82 USD) unless another run takes them"
            + NEXT,
        ),
        (
            {G5: 4},
            {"min": 1},
            "4 x g5.xlarge stay idle for some 30 minutes (1.51 USD) unless another run takes them, down to 1 "
            "(minWorkers)" + NEXT,
        ),
        ({G5: 2}, {"min": 2}, "2 x g5.xlarge keep running (minWorkers): 2.01 USD an hour (1,469 a month)"),
        ({G5: 1}, {"min": 2}, "1 x g5.xlarge keeps running (minWorkers): 1.01 USD an hour (734 a month)"),
        (
            {G5: 2},
            {"idle_minutes": 0},
            "2 x g5.xlarge keep running (idleTimeoutMinutes is 0): 2.01 USD an hour (1,469 a month)",
        ),
        ({}, {}, None),
        ({InstanceKind("g5.xlarge", "on-demand", "gone-workers"): 1}, {}, None),
    ],
)
def test_lines_after_a_run_name_what_stays(
    used: dict[InstanceKind, int], limits: dict[str, int], line: str | None, put: Callable[..., Any]
) -> None:
    put(**limits)
    assert lines_after_run(lambda seconds: used, then_stop=False) == [*([line] if line else []), HEAD_LINE]


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ({}, "2 x g5.xlarge are being stopped (--then-stop)"),
        ({"idle_minutes": 0}, "2 x g5.xlarge are being stopped (--then-stop)"),
        ({"min": 1}, "2 x g5.xlarge are being stopped, down to 1 (minWorkers) (--then-stop)"),
        ({"min": 2}, "2 x g5.xlarge keep running (minWorkers): 2.01 USD an hour (1,469 a month)"),
    ],
)
def test_workers_of_then_stop_are_being_stopped(limits: dict[str, int], line: str, put: Callable[..., Any]) -> None:
    put(**limits)
    assert lines_after_run(lambda seconds: {G5: 2}, then_stop=True) == [line, HEAD_LINE]


def test_workers_of_several_pools_are_one_line(put: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    put(pools={"h100_workers": {**H100, "min": 1}}, prices=OF_POOLS)
    monkeypatch.setattr(cost_module, "ask_aws", lambda *_, **__: None)
    [line, _] = lines_after_run(lambda seconds: {G5: 1, H100_SPOT: 1}, then_stop=False)
    assert line == (
        "1 x g5.xlarge stays idle for some 30 minutes (0.50 USD) unless another run takes it; "
        "1 x p5.48xlarge on spot keeps running (workerPools.h100.min)" + NEXT
    )


def test_unknown_prices_are_left_out_after_a_run(put: Callable[..., Any]) -> None:
    put(prices=None, head_usd=None)
    lines = lines_after_run(lambda seconds: {G5: 2}, then_stop=False)
    assert lines == ["2 x g5.xlarge stay idle for some 30 minutes unless another run takes them" + NEXT]


@pytest.mark.parametrize(("minutes", "seconds"), [(30, 1800.0), (0, math.inf)])
def test_instances_within_the_idle_timeout_count(minutes: int, seconds: float, put: Callable[..., Any]) -> None:
    put(idle_minutes=minutes)
    asked: list[float] = []

    def most(since: float) -> dict[InstanceKind, int]:
        asked.append(since)
        return {}

    lines_after_run(most, then_stop=False)
    assert asked == [seconds]


def test_outside_a_stack_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    assert lines_after_run(lambda seconds: {G5: 2}, then_stop=False) == []


IN_BLOCK = {**H100, "spot": False, "reservation": {"id": "cr-0123456789abcdef0", "is_block": True}}


def test_instances_of_a_block_cost_their_disks(put: Callable[..., Any]) -> None:
    """Beside others of the type on demand."""
    put(pools={"block_workers": IN_BLOCK, "h100_workers": {**H100, "spot": False}}, prices=OF_POOLS)
    of_block = InstanceKind("p5.48xlarge", "capacity-block", "block-workers")
    on_demand = InstanceKind("p5.48xlarge", "on-demand", "h100-workers")
    for market in ("capacity-block", "on-demand", None):  # AWS does not say how the instance's metadata name it
        cost = cost_of({of_block._replace(market=market): 2.0, on_demand: 1.0})
        assert cost
        assert cost["usd"] == 1.0 + 55.04


def test_reserved_instances_on_demand_have_their_price(put: Callable[..., Any]) -> None:
    reservation = {"id": "cr-0123456789abcdef0", "is_block": False}
    put(pools={"h100_workers": {**IN_BLOCK, "reservation": reservation}}, prices=OF_POOLS)
    cost = cost_of({InstanceKind("p5.48xlarge", "on-demand", "h100-workers"): 2.0})
    assert cost
    assert cost["usd"] == 110.08
