"""Numbers of workers over hours, with faults of AWS and of the head at every point, in the simulator."""

from __future__ import annotations

import math

import pytest

from ray_on_ecs.contract import WORKER_TIMEOUT
from tests.scaling_api import HeadDied, Lost, Refused
from tests.scaling_simulator import LOOK_SECONDS, Run, Simulator, at_call

HOUR = 3600
RUN_SECONDS = 1200
READINGS = pytest.mark.parametrize("counts_pending", [True, False], ids=["counts pending", "counts in service"])
CALLS = ("SetCapacity", "SetCount", "End")


def run(nodes: int = 2, *, then_stop: bool = False, at: float = 25, seconds: float = RUN_SECONDS) -> Run:
    return Run(nodes, seconds, requested_at=at, then_stop=then_stop)


def check_end(simulator: Simulator, started: int) -> None:
    """Check that all runs have run on no more instances than that, and that nothing is left."""
    assert all(each.began_at is not None and each.ended_at is not None for each in simulator.runs)
    assert simulator.started <= started
    assert not simulator.counted()
    assert (simulator.count, simulator.capacity) == (0, 0)


@READINGS
@pytest.mark.parametrize("then_stop", [False, True])
@pytest.mark.parametrize(
    ("most", "nodes", "warm"), [(8, 1, 0), (8, 2, 0), (8, 8, 0), (8, 8, 2), (64, 64, 0), (8, 1, 3)]
)
def test_a_run_starts_each_instance_once(
    most: int, nodes: int, warm: int, then_stop: bool, counts_pending: bool
) -> None:
    of_head = run(nodes, then_stop=then_stop)
    simulator = Simulator(most, [of_head], warm=warm, counts_pending=counts_pending).stay(2 * HOUR)
    check_end(simulator, max(nodes, warm))
    by_alarms = run(nodes)
    Simulator(most, [by_alarms], warm=warm, counts_pending=counts_pending, has_head_calls=False).stay(2 * HOUR)
    assert of_head.began_at is not None
    assert by_alarms.began_at is not None
    gain = by_alarms.began_at - of_head.began_at
    assert gain >= (120 if nodes > warm else 0)


def test_a_large_run_starts_as_fast_as_a_small_one() -> None:
    began = []
    for nodes in (1, 8, 64):
        each = run(nodes)
        Simulator(64, [each]).stay(HOUR)
        began.append(each.began_at)
    assert began[0] is not None
    assert began == [began[0]] * 3


def test_an_empty_instance_ends_sooner_than_by_ecs() -> None:
    minutes = []
    for has_head_calls in (True, False):
        each = run(8)
        simulator = Simulator(8, [each], has_head_calls=has_head_calls).stay(2 * HOUR)
        minutes.append(simulator.billed_minutes(each.began_at or 0))
    by_head, by_alarms = minutes
    assert by_alarms - by_head > 8 * 10


@READINGS
@pytest.mark.parametrize("is_made", [True, False], ids=["call made", "call not made"])
@pytest.mark.parametrize("then_stop", [False, True])
def test_a_head_may_die_at_each_call(then_stop: bool, is_made: bool, counts_pending: bool) -> None:
    whole = Simulator(4, [run(3, then_stop=then_stop)], counts_pending=counts_pending).stay(2 * HOUR)
    assert len(whole.calls) >= 5
    for number in range(1, len(whole.calls) + 1):
        dying = at_call(number, HeadDied(is_made))
        check_end(
            Simulator(4, [run(3, then_stop=then_stop)], counts_pending=counts_pending, on_call=dying).stay(2 * HOUR), 4
        )


@READINGS
@pytest.mark.parametrize("then_stop", [False, True])
def test_nothing_runs_on_if_the_head_dies_for_good(then_stop: bool, counts_pending: bool) -> None:
    for died_at in range(0, 3600, 75):
        simulator = Simulator(4, [run(3, then_stop=then_stop)], counts_pending=counts_pending)
        simulator.stay(died_at)
        simulator.head_until, simulator.head_from = simulator.now, math.inf
        for each in simulator.runs:
            if each.ended_at is None:
                simulator.end(each)  # a run does not outlive its head
        simulator.stay(4800)
        assert simulator.started <= 4
        assert not simulator.counted(), f"died after {died_at} s"


@READINGS
@pytest.mark.parametrize("stale", [0, 30, 60])
@pytest.mark.parametrize("error", [Lost, Refused])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_may_always_fail(name: str, error: type[Exception], stale: float, counts_pending: bool) -> None:
    def on_call(called: str) -> None:
        if called == name:
            raise error("the test")

    simulator = Simulator(
        8, [run(3), run(2, at=4000)], stale=stale, counts_pending=counts_pending, on_call=on_call
    ).stay(4 * HOUR)
    # Without one of the calls ECS starts two instances for the first task, as it does without a head.
    check_end(simulator, 3 + 2 + (error is Refused))


@READINGS
def test_answers_may_be_a_minute_old(counts_pending: bool) -> None:
    simulator = Simulator(8, [run(3), run(5, at=3000, then_stop=True)], stale=60, counts_pending=counts_pending)
    check_end(simulator.stay(4 * HOUR), 5 + 3)


@READINGS
@pytest.mark.parametrize("sees", ["the same demand", "no demand"])
def test_two_heads_for_a_moment(sees: str, counts_pending: bool) -> None:
    simulator = Simulator(8, [run(3, then_stop=True)], counts_pending=counts_pending)
    other = simulator._new_head()
    while simulator.now < 2 * HOUR:
        simulator.tick()
        if simulator.now % LOOK_SECONDS == 0:
            need = simulator.need()
            if sees == "no demand":
                need = type(need)(requested=0, available=0, in_use=0)
            other.look(simulator.info(), {"workers": need})
    check_end(simulator, 3)


def test_numbers_are_never_above_the_maximum() -> None:
    simulator = Simulator(4, [run(9)]).stay(HOUR)
    assert simulator.started == 4
    assert max(detail for _, name, detail in simulator.calls if name != "End") == 4


def test_the_minimum_stays() -> None:
    simulator = Simulator(4, [run(3, then_stop=True)], warm=1, least=1).stay(2 * HOUR)
    assert (simulator.count, simulator.capacity, len(simulator.counted())) == (1, 1, 1)


@READINGS
def test_a_run_that_gives_up_withdraws_its_request(counts_pending: bool) -> None:
    gives_up = run(4, then_stop=True)
    gives_up.gives_up_after = 1200
    simulator = Simulator(4, [gives_up], shortage=2, counts_pending=counts_pending).stay(1400)
    simulator.shortage = math.inf
    simulator.stay(2 * HOUR)
    assert simulator.started == 2
    assert (simulator.capacity, simulator.counted()) == (0, [])


def test_a_suspended_group_is_left_alone() -> None:
    simulator = Simulator(4, [run(2)], counts_pending=True)
    simulator.suspended = ["Launch"]
    simulator.stay(600)
    assert simulator.calls == []
    simulator = Simulator(4, [], warm=3)
    simulator.count, simulator.suspended = 0, ["Terminate"]
    simulator.stay(600)
    assert not [name for _, name, _ in simulator.calls if name == "End"]


@pytest.mark.parametrize("moved_at", range(30, 420, 30))
def test_a_zone_failover_gets_its_instances(moved_at: int) -> None:
    """The driver ends the instances in the old zone without lowering the group's capacity."""
    moving = run(3, then_stop=True)
    simulator = Simulator(4, [moving], warm=1)
    simulator.count = simulator.capacity = 1
    simulator.stay(moved_at)
    if moving.began_at is None:
        for each in simulator.counted():
            each.task_at = each.ending_at = simulator.now
    simulator.stay(2 * HOUR)
    assert moving.began_at is not None
    assert simulator.started <= 3 + 4
    assert not simulator.counted()


@READINGS
@pytest.mark.parametrize("idle", [1, 2, 4])
def test_instances_of_a_former_type_make_room(idle: int, counts_pending: bool) -> None:
    """A larger type is configured while workers are idle, and fill the group."""
    waits = run(4)
    simulator = Simulator(4, [waits], warm=idle, counts_pending=counts_pending)
    for each in simulator.instances:
        each.instance_type, each.task_at = "p3.2xlarge", math.inf
    simulator.deploy()
    simulator.stay(2 * HOUR)
    check_end(simulator, idle + 4)
    assert waits.began_at is not None
    assert waits.began_at < 15 * 60


@pytest.mark.parametrize("failed", [0, 60, 900, 1700])
@pytest.mark.parametrize("available", [0, 1])
def test_a_run_begins_although_the_first_deployment_has_failed(failed: float, available: int) -> None:
    """It has failed for a lack of capacity, before the run has begun to wait or while it does."""
    waits = run(2, at=900)
    waits.gives_up_after = WORKER_TIMEOUT
    simulator = Simulator(4, [waits], shortage=available)
    simulator.count = simulator.capacity = 2
    simulator.deploy()
    simulator.stay(failed)
    simulator.deployed_at, simulator.failed_at, simulator.shortage = None, simulator.now, 4
    simulator.stay(3 * HOUR)
    check_end(simulator, 2)
    assert waits.began_at is not None


def test_a_lack_of_capacity_at_the_first_update_ends_without_another_one() -> None:
    """The deployment of the first `pulumi up` fails, and the one that follows it, too."""
    waits = run(2)
    simulator = Simulator(4, [waits], shortage=1)
    simulator.count = simulator.capacity = 2
    simulator.deploy()
    simulator.stay(2.25 * HOUR)
    assert simulator.failed_at is not None
    assert waits.began_at is None
    simulator.shortage = 4
    simulator.stay(5 * HOUR)
    check_end(simulator, 2)
    assert [name for _, name, _ in simulator.calls].count("Redeploy") == 2


def test_a_type_that_the_head_does_not_know_is_not_launched_for_ever() -> None:
    simulator = Simulator(4, [run(2, seconds=10)])
    for _ in range(2 * HOUR // 60):
        simulator.stay(60)
        for each in simulator.instances:
            each.instance_type = "p3.2xlarge"
    assert simulator.started == 2


def test_former_types_in_use_cost_no_calls() -> None:
    lasting = run(2, seconds=2 * HOUR)
    simulator = Simulator(4, [lasting], warm=2).stay(300)
    assert lasting.began_at is not None
    for each in simulator.instances:
        each.instance_type = "p3.2xlarge"
    simulator.looks = 0
    simulator.stay(HOUR)
    assert simulator.looks <= 61


@pytest.mark.parametrize(("is_made", "error"), [(True, Lost), (False, Refused)])
def test_a_new_deployment_is_repeated_until_it_begins(is_made: bool, error: type[Exception]) -> None:
    waits = run(2)
    simulator = Simulator(4, [waits], on_call=at_call(1, error()))
    simulator.failed_at = 0
    simulator.stay(3 * HOUR)
    check_end(simulator, 2)
    assert [name for _, name, _ in simulator.calls].count("Redeploy") == (1 if is_made else 2)


def test_a_spot_instance_that_goes_is_replaced_once() -> None:
    lasting = run(3, seconds=3000)
    simulator = Simulator(4, [lasting]).stay(1200)
    gone = lasting.on[0]
    gone.is_used = False
    gone.ending_at = simulator.now
    lasting.began_at, lasting.on = None, []
    for instance in simulator.instances:
        instance.is_used = False
    simulator.stay(3 * HOUR)
    check_end(simulator, 4)


# --then-stop


def test_then_stop_leaves_what_was_idle_before() -> None:
    first, second = run(4, seconds=300), run(2, at=900, then_stop=True, seconds=300)
    simulator = Simulator(8, [first, second]).stay(2100)
    assert second.ended_at is not None
    assert len(simulator.counted()) == 2, "the other run's workers stay for the idle time"


def test_then_stop_leaves_the_workers_of_others() -> None:
    lasting, short = run(2, seconds=2 * HOUR), run(3, at=60, then_stop=True)
    simulator = Simulator(8, [lasting, short]).stay(HOUR)
    assert short.ended_at is not None
    assert lasting.ended_at is None
    assert len(simulator.counted()) == simulator.count == 2


def test_then_stop_leaves_workers_for_a_run_that_waits() -> None:
    first, second = run(4, then_stop=True), run(4, at=60)
    simulator = Simulator(4, [first, second]).stay(3 * HOUR)
    assert second.began_at == first.ended_at
    check_end(simulator, 4)


def test_a_run_behind_it_makes_its_demand_known_in_time() -> None:
    """A run that was queued asks for its workers some seconds after the run before it has ended."""
    first, second = run(4, then_stop=True), run(4, at=60)
    simulator = Simulator(4, [first, second])
    simulator.waiting = lambda: [] if first.began_at and not first.ended_at else Simulator.waiting(simulator)
    while first.ended_at is None:
        simulator.tick()
    second.requested_at = simulator.now + 40
    jobs = [*simulator.jobs(), {**simulator.jobs()[0], "submission_id": "second", "status": "RUNNING", "end_time": None,
                                "metadata": {"run_name": "second", "storage_path": "s3://b"}}]  # fmt: skip
    simulator.jobs = lambda: jobs
    simulator.stay(HOUR)
    assert simulator.started == 4


def test_without_then_stop_the_workers_stay_for_the_idle_time() -> None:
    each = run(2)
    simulator = Simulator(4, [each])
    while each.ended_at is None:
        simulator.tick()
    simulator.stay(1500)
    assert len(simulator.counted()) == 2
