"""Numbers of workers of several kinds: shares of a pool's maximum, and stories of pools and zones in the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ray_on_ecs.cluster_info import NodeGroup
from ray_on_ecs.node import numbers
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.scaling import Scaler, pools_of
from tests.scaling_api import Api, HeadDied, Lost, Refused
from tests.scaling_simulator import Run, Simulator, Stack, at_call
from tests.worker_pools import node_group, workers

COMMAND_NAME = "ray-head"
HOUR = 3600
A, B, C = "workers", "workers-b", "workers-c"


def need(requested: int = 0, in_use: int = 0, available: int | None = None) -> Need:
    """The demand for nodes of one GPU."""
    there = max(in_use, available or 0)
    idle = (0.0,) * (there - in_use)
    return Need(requested=max(requested, in_use), available=there, in_use=in_use, idle_seconds=idle)


def pool(*minimums: int, most: int = 4, units: int = 1) -> dict[str, NodeGroup]:
    """The node groups of one pool, with these minimums."""
    return {
        kind: node_group(max=most, min=least, units=units) for kind, least in zip((A, B, C), minimums, strict=False)
    }


# Arithmetic


def shares(needs: list[Need], limits: dict[str, NodeGroup]) -> list[int]:
    """The workers that each kind may have."""
    numbers_read = numbers.in_pools(workers(**limits), dict(zip(limits, needs, strict=True)))
    return [each["max"] for each in numbers_read.values()]


@pytest.mark.parametrize(
    ("needs", "granted"),
    [
        ([need(), need()], [4, 4]),
        ([need(2), need()], [4, 2]),
        ([need(), need(2)], [2, 4]),
        ([need(2), need(2)], [2, 2]),
        ([need(4), need(4)], [4, 0]),
        ([need(4), need(4, available=3)], [0, 4]),
        ([need(4, available=2), need(4, available=2)], [4, 0]),
        ([need(in_use=3), need(4)], [3, 1]),
        ([need(4), need(in_use=3)], [1, 3]),
        ([need(4, in_use=1), need(4, in_use=1)], [3, 1]),
        ([need(in_use=4), need(2)], [4, 0]),
        ([need(in_use=3), need(in_use=3)], [3, 3]),
        ([need(available=4), need(4)], [0, 4]),
        ([need(9), need()], [4, 0]),
        ([need(2), need(1), need(1)], [2, 1, 1]),
        ([need(3), need(3), need(3, available=3)], [1, 0, 3]),
    ],
)
def test_kinds_of_one_pool_share_its_maximum(needs: list[Need], granted: list[int]) -> None:
    assert shares(needs, pool(*(0 for _ in needs))) == granted


@pytest.mark.parametrize(
    ("needs", "least", "most", "granted"),
    [
        ([need(), need(4)], 1, 4, [0, 4]),
        ([need(), need(1)], 1, 1, [0, 1]),
        ([need(), need(2)], 2, 4, [2, 4]),
        ([need(available=1), need(4)], 1, 4, [1, 3]),
        ([need(available=1), need(1)], 1, 1, [1, 0]),
        ([need(available=1), need(4)], 2, 4, [1, 3]),
        ([need(in_use=1), need(4)], 2, 4, [1, 3]),
        ([need(in_use=2), need(4)], 1, 4, [2, 2]),
        ([need(), need(in_use=4)], 1, 4, [0, 4]),
        ([need(), need()], 1, 4, [4, 4]),
    ],
)
def test_a_minimum_is_granted_as_far_as_it_exists(needs: list[Need], least: int, most: int, granted: list[int]) -> None:
    assert shares(needs, pool(least, 0, most=most)) == granted


def test_shares_are_in_nodes() -> None:
    assert shares([need(9), need(4)], pool(0, 0, units=8)) == [3, 1 + 1]


def test_shares_of_any_demand_keep_to_the_maximum() -> None:
    limits = pool(1, 0, 0)
    kinds = [need(requested, used, used + idle) for requested in (0, 2, 4) for used in (0, 1, 2) for idle in (0, 2)]
    for needs in itertools.product(kinds, repeat=3):
        granted = shares([*needs], limits)
        least = (limit["min"] for limit in limits.values())
        held = [max(each.in_use, min(number, each.nodes)) for each, number in zip(needs, least, strict=True)]
        assert all(number <= share <= 4 for number, share in zip(held, granted, strict=True))
        given = [
            max(number, min(each.requested, share)) for each, number, share in zip(needs, held, granted, strict=True)
        ]
        assert sum(given) <= max(4, sum(held))


@pytest.mark.parametrize(
    ("needs", "kinds"),
    [
        ([need(), need()], set()),
        ([need(available=2), need(2)], {A}),
        ([need(2), need(available=2)], {B}),
        ([need(2), need(2)], {A, B}),
        ([need(available=2), need(2, available=2)], set()),
        ([need(available=4), need(9, available=4)], set()),
    ],
)
def test_idle_workers_give_way_to_another_zone(needs: list[Need], kinds: set[str]) -> None:
    limits = pool(0, 0)
    assert numbers.giving_way(dict(zip(limits, needs, strict=True)), limits) == kinds


def test_idle_workers_do_not_give_way_to_another_pool() -> None:
    limits = {A: node_group(), "h100-workers": node_group("h100")}
    assert numbers.giving_way({A: need(available=2), "h100-workers": need(2)}, limits) == set()


# Stories


def run(nodes: int = 2, *, at: float = 25, seconds: float = 1200, then_stop: bool = False) -> Run:
    return Run(nodes, seconds, requested_at=at, then_stop=then_stop)


def zones(a: Any = (), b: Any = (), most: int = 4, **more: Any) -> list[Simulator]:
    """Simulators of one pool with these runs in two zones; an argument is for both, or with a_ or b_ for one."""
    parts = []
    for kind, zone, runs in ((A, "a", a), (B, "b", b)):
        own = {key.removeprefix(f"{zone}_"): value for key, value in more.items() if key[1] != "_" or key[0] == zone}
        parts.append(Simulator(most, runs, kind=kind, zone=f"us-west-2{zone}", **own))
    return parts


def within(most: int) -> Callable[[Stack], None]:
    """Return a check that what is in use or to be started is within a pool's maximum."""

    def check(stack: Stack) -> None:
        parts = stack.parts.values()
        used = {part.kind: part.need().in_use for part in parts}
        for part in parts:
            others = sum(used[other.kind] for other in parts if other is not part)
            assert len(part.counted()) + others <= most, f"after {stack.now} s"

    return check


def check_end(stack: Stack) -> None:
    """Check that all runs have run, and that nothing is left."""
    for part in stack.parts.values():
        assert all(each.began_at is not None and each.ended_at is not None for each in part.runs)
        assert (part.count, part.capacity, part.counted()) == (0, 0, [])


def moves(given: float = 300, heads: int = 1, **more: Any) -> tuple[Stack, Run]:
    """A run for all of a pool whose first zone has one instance, so that the run moves to the other one."""
    moving = run(4)
    stack = Stack(*zones([moving], a_shortage=1, **more), heads=heads)
    stack.stay(given).move(moving, A, B)
    return stack, moving


def test_a_run_moves_to_another_zone() -> None:
    stack, moving = moves()
    asked = moving.requested_at
    assert stack.parts[A].started == 1
    stack.stay(600)
    assert not stack.parts[A].counted(), "it gives way, long before the idle time"
    assert stack.parts[A].capacity == 0, "the open request is withdrawn"
    stack.stay(2 * HOUR)
    check_end(stack)
    assert stack.parts[B].started == 4
    assert moving.began_at is not None
    assert moving.began_at - asked < 300 + 420


def test_a_run_that_comes_back_finds_the_zone_as_it_was() -> None:
    stack, moving = moves(b_shortage=0)
    stack.stay(60).move(moving, B, A)
    stack.parts[A].shortage = 4
    check_end(stack.stay(2 * HOUR))
    assert (stack.parts[A].started, stack.parts[B].started) == (4, 0)


def test_idle_workers_end_at_once_for_another_zone() -> None:
    parts = zones((), [run(4, at=600)], a_warm=2)
    stack = Stack(*parts).stay(590)
    assert len(parts[0].counted()) == 2
    stack.stay(300)
    assert not parts[0].counted()
    check_end(stack.stay(2 * HOUR))


def test_a_minimum_does_not_give_way() -> None:
    parts = zones((), [run(3, at=600)], a_warm=1, a_least=1)
    Stack(*parts, on_tick=within(4)).stay(2 * HOUR)
    assert (len(parts[0].counted()), parts[1].started) == (1, 3)


def test_workers_in_use_keep_their_place_in_the_pool() -> None:
    long, second = run(3, seconds=HOUR), run(2, at=900)
    stack = Stack(*zones([long], [second]), on_tick=within(4)).stay(1500)
    assert len(stack.parts[B].counted()) == 1, "the fourth of the pool"
    check_end(stack.stay(3 * HOUR))
    assert second.began_at is not None
    assert long.ended_at is not None
    assert second.began_at > long.ended_at
    assert stack.parts[A].started == 3


def test_two_zones_may_be_in_use_at_a_time() -> None:
    first, second = run(2), run(2, at=60)
    stack = Stack(*zones([first], [second]), on_tick=within(4)).stay(900)
    assert first.began_at is not None
    assert second.began_at is not None
    check_end(stack.stay(2 * HOUR))
    assert [part.started for part in stack.parts.values()] == [2, 2]


def test_a_minimum_that_ec2_lacks_leaves_its_place_to_another_zone() -> None:
    moving = run(1)
    stack = Stack(*zones([moving], most=1, a_least=1, a_shortage=0)).stay(300)
    stack.move(moving, A, B)
    stack.stay(600)
    assert moving.began_at is not None


@pytest.mark.parametrize(("record", "left"), [(["default", "h100"], 0), (["h100"], 1)])
def test_a_pool_that_its_run_has_left_stops_at_its_end(record: list[str], left: int) -> None:
    moving = run(2, then_stop=True, seconds=400)
    parts = two_pools([moving], (), shortage=1)
    parts[1].shortage = 2
    stack = Stack(*parts, pools_of=lambda job: record).stay(600)
    stack.move(moving, A, "h100-workers")
    stack.stay(1000)
    assert moving.ended_at is not None
    assert [len(part.counted()) for part in parts] == [left, 0]


def two_pools(default: Any = (), h100: Any = (), **more: Any) -> list[Simulator]:
    return [
        Simulator(4, default, **more),
        Simulator(2, h100, kind="h100-workers", pool="h100", zone="us-west-2c", **more),
    ]


@pytest.mark.parametrize("kind", ["workers", "h100-workers"])
def test_one_pools_demand_starts_nothing_in_another(kind: str) -> None:
    runs = {"workers": [run(2)], "h100-workers": [run(2)]}
    parts = two_pools(*(runs[each] if each == kind else () for each in runs))
    check_end(Stack(*parts).stay(2 * HOUR))
    assert {part.kind: part.started for part in parts} == {**dict.fromkeys(runs, 0), kind: 2}


def test_pools_scale_side_by_side() -> None:
    parts = two_pools([run(4), run(2, at=2000)], [run(2, at=60), run(1, at=1500)])
    check_end(Stack(*parts).stay(3 * HOUR))
    assert all(each.began_at - each.requested_at < 420 for part in parts for each in part.runs[:1] if each.began_at)
    assert [part.started for part in parts] == [4, 2]


def test_idle_workers_of_another_pool_do_not_give_way() -> None:
    parts = two_pools([run(4, at=600)], (), warm=0)
    parts[1].instances, parts[1].count, parts[1].capacity = (
        Simulator(2, (), kind="h100-workers", warm=1).instances,
        1,
        1,
    )
    Stack(*parts).stay(1500)
    assert len(parts[1].counted()) == 1


@pytest.mark.parametrize(
    ("record", "left"),
    [(["h100"], 2), ([], 0), (["removed"], 2), (["default", "h100"], 0), (["removed", "h100"], 2)],
)
def test_then_stop_stops_the_pools_that_its_run_used(record: list[str], left: int) -> None:
    """The other pool's workers became idle while the run was under way."""
    parts = two_pools([run(2, at=25, seconds=900)], [run(2, at=30, seconds=1200, then_stop=True)])
    stack = Stack(*parts, pools_of=lambda job: record).stay(2400)
    assert all(each.ended_at is not None for part in parts for each in part.runs)
    assert len(parts[0].counted()) == left
    assert len(parts[1].counted()) == (2 if record == ["removed"] else 0)
    stack.stay(2 * HOUR)
    check_end(stack)


def test_two_runs_of_two_pools_each_stop_their_own() -> None:
    parts = two_pools([run(2, then_stop=True, seconds=1000)], [run(1, then_stop=True, seconds=1100)])
    pools = {"run-0": ["default"], "h100-workers-0": ["h100"]}
    Stack(*parts, pools_of=lambda job: pools[job["submission_id"]]).stay(2400)
    assert [part.counted() for part in parts] == [[], []]


def test_then_stop_of_long_ago_stops_nothing_later() -> None:
    of_h100 = [run(1, then_stop=True, seconds=600), run(1, at=2000)]
    parts = two_pools([run(1, at=3000, then_stop=True, seconds=600)], of_h100)
    pools = {"run-0": ["default"], "h100-workers-0": ["h100"]}
    Stack(*parts, pools_of=lambda job: pools[job["submission_id"]]).stay(4300)
    assert of_h100[1].ended_at is not None
    assert [len(part.counted()) for part in parts] == [0, 1]


def test_a_broken_record_stops_the_idle_workers_of_all_pools() -> None:
    def refuse(job: Any) -> list[str]:
        raise KeyError("name")

    parts = two_pools([run(1, seconds=900)], [run(1, seconds=1200, then_stop=True)])
    Stack(*parts, pools_of=refuse).stay(2400)
    assert [part.counted() for part in parts] == [[], []]


# Faults


@pytest.mark.parametrize("is_made", [True, False], ids=["call made", "call not made"])
def test_a_head_may_die_at_each_call_of_a_move(is_made: bool) -> None:
    whole, _ = moves()
    whole.stay(2 * HOUR)
    for number in range(1, sum(len(part.calls) for part in whole.parts.values()) + 1):
        stack, _ = moves(on_call=at_call(number, HeadDied(is_made)))
        check_end(stack.stay(3 * HOUR))
        assert stack.parts[B].started <= 4 + 2


@pytest.mark.parametrize("error", [Lost, Refused])
@pytest.mark.parametrize("name", ["SetCapacity", "SetCount", "End"])
def test_a_call_may_always_fail_during_a_move(name: str, error: type[Exception]) -> None:
    def on_call(called: str) -> None:
        if called == name:
            raise error("the test")

    stack, _ = moves(on_call=on_call)
    check_end(stack.stay(3 * HOUR))


@pytest.mark.parametrize("stale", [0, 60])
def test_two_heads_move_a_run(stale: float) -> None:
    stack, moving = moves(heads=2, stale=stale)
    check_end(stack.stay(3 * HOUR))
    assert stack.parts[B].started == 4
    assert moving.began_at is not None


def test_alarms_alone_move_a_run() -> None:
    stack, _ = moves()
    stack._head_from = float("inf")
    check_end(stack.stay(3 * HOUR))


# AWS


def test_more_than_ten_services_are_described_in_tens(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Simulator(2, [run(1)], kind=f"p{number}-workers", pool=f"p{number}") for number in range(12)]
    sizes: list[int] = []
    describe = Api.describe_services
    monkeypatch.setattr(
        Api, "describe_services", lambda api, **given: (sizes.append(len(given["services"])), describe(api, **given))[1]
    )
    Stack(*parts).stay(600)
    assert all(part.started == 1 for part in parts)
    assert set(sizes) == {10, 2}


def test_a_service_of_one_pool_may_be_missing() -> None:
    parts = two_pools([run(2)], [run(1)])
    described = parts[1]._service
    parts[1]._service = lambda: {**described(), "status": "INACTIVE"}
    Stack(*parts).stay(900)
    assert (parts[0].started, parts[1].calls) == (2, [])


def test_a_stack_without_a_maximum_asks_aws_nothing() -> None:
    scaler = Scaler(list, connect=lambda service: pytest.fail(f"{service} was asked"))
    scaler.look(Stack(Simulator(0, [])).info(), {A: need(3)})


def test_a_request_that_no_pool_fits_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    from ray_on_ecs.pools import Request

    scaler = Scaler(list)
    for unmet in ([Request({"GPU": 16})], [Request({"GPU": 16})], [], [Request({"GPU": 16})]):
        scaler._name_unmet(unmet)
    line = "ray-head: scaling: a program waits for 16 GPU on one node, which no pool has"
    assert capsys.readouterr().err.splitlines() == [line, line]


@pytest.mark.parametrize(
    ("status", "pools"),
    [
        ('{"pool": {"name": "h100", "zone": "us-west-2c"}, "pools": ["l4", "h100"]}', ["l4", "h100"]),
        ('{"state": "training"}', []),
        ('{"pool": null}', []),
        (None, []),
    ],
)
def test_the_pools_of_a_run_are_in_its_record(tmp_path: Any, status: str | None, pools: list[str]) -> None:
    if status:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "status.json").write_text(status)
    assert pools_of({"metadata": {"run_name": "mine", "storage_path": str(tmp_path)}}) == pools
