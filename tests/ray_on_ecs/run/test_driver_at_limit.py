"""Ends of a run at its limit, in each state and beside each other end, with simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import Interrupted, LimitReached, ResourceError, TrainingError, UsageError
from ray_on_ecs.run import driver as module
from ray_on_ecs.run.group import GroupError, WorkerStatus
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.limit import MARGIN_SECONDS, NOTICE_SECONDS, Limit
from ray_on_ecs.tracking.cost import InstanceKind
from tests.ray_on_ecs.run.test_driver import Run, clock, give_notice, hang, lose, make_room, stop
from tests.run_folders import Clock

__all__ = ["clock"]  # a fixture

GPU = InstanceKind("g5.xlarge", "spot", "workers")
REACHED = "--max-hours 1 is reached: "


@pytest.fixture
def run(tmp_path: Path, clock: Clock) -> Run:
    return limited(Run(tmp_path, max_hours=1.0), clock)


def limited(run: Run, clock: Clock) -> Run:
    """Count the run's time by the clock of the test, and its instances at a dollar an hour."""
    driver = run.driver
    now = clock.monotonic
    driver._limit = Limit(
        driver._config, run.record.spent(), driver.hours, lambda kinds: dict.fromkeys(kinds, 1.0), now
    )
    return run


def pass_time(run: Run, clock: Clock, left: float, steps: int = 60) -> None:
    """Let the scripts start, and train until so long (s) before the run's limit of an hour."""
    run.until("running")
    run.step()
    seconds = 3600.0 - left - run.driver._limit.spent()["seconds"]
    for _ in range(steps):
        clock.now += seconds / steps
        run.step()


def end(run: Run) -> TrainingError:
    """Let the start end, and the run with it; return its error."""
    try:
        run.driver._direct(run.workers)
        run.driver._decide(run.workers)
    except TrainingError as error:
        return error
    raise AssertionError("the run goes on")


def test_scripts_are_told_before_the_limit_and_end_by_it(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS + 1)
    assert run.told.action == "run"
    clock.now += 2
    told = run.step()
    assert (told.action, told.reclaimed, told.waits) == ("end", (0, 1), True)
    assert told.end_at == pytest.approx(clock.now + NOTICE_SECONDS - 1 - MARGIN_SECONDS)
    assert run.lines == ["the run is near its limit: the scripts have 84 s to end"]
    error = end(run)
    assert str(error).startswith(REACHED)
    assert (error.exit_status, run.record.restarts) == (4, [])


def test_late_look_leaves_the_time_to_save(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=-500.0, steps=2)
    assert (run.told.action, run.told.end_at) == ("end", clock.now + 30)


AT_LIMIT: dict[str, Callable[[Run], None]] = {
    "fails": lambda run: run.workers.fail(),
    "is lost": lambda run: lose(run, 1, with_places=True),
    "is reclaimed": give_notice,
    "hangs": hang,
    "could grow": make_room,
}


@pytest.mark.parametrize("event", AT_LIMIT)
@pytest.mark.parametrize("is_told", [False, True], ids=["with the notice", "in the notice"])
def test_run_ends_at_its_limit_whatever_else_happens(run: Run, clock: Clock, event: str, is_told: bool) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS + 1)
    run.workers.is_at_work = not is_told
    clock.now += 2
    if is_told:
        run.step()
    AT_LIMIT[event](run)
    run.step()
    assert run.told.action == "end", "a hang at the limit leaves the time to save, too"
    run.workers.is_at_work = True
    assert isinstance(end(run), LimitReached)
    assert run.home.groups == []


def test_clock_that_is_set_back_does_not_extend_the_notice(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    run.workers.is_at_work = False
    monkeypatch.setattr(clock, "time", lambda: clock.now - 3600)
    assert run.step().end_at > clock.time() + 3600
    clock.now += NOTICE_SECONDS
    assert run.step().end_at == clock.time()


def test_reclaimed_node_ends_the_notice_sooner(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    run.workers.is_at_work = False
    clock.now += 1
    run.home.draining_nodes = {"node-1": clock.now + 20}
    assert run.step().end_at == clock.now + 20 - module.MARGIN_SECONDS


def test_run_that_grows_ends_by_its_limit(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS + 10)
    make_room(run)
    assert run.step().end_at == pytest.approx(clock.now + NOTICE_SECONDS + 10 - MARGIN_SECONDS)
    assert run.driver._ended_for == "grows"


def test_mistake_at_the_limit_is_the_mistake(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS + 1)
    words = LastWords("NameError: x", "NameError")
    run.workers.tell(1, status=1, ended_at=100.0, has_ended=True, words=words)
    clock.now += 2
    assert isinstance(end(run), UsageError)


def test_failure_just_before_the_limit_does_not_restart(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS + 1)
    run.workers.fail()
    run.step()
    clock.now += 2
    assert isinstance(end(run), LimitReached)
    assert run.record.restarts == []


@pytest.mark.parametrize("is_cut", [False, True])
def test_run_that_finishes_in_the_notice_is_finished(run: Run, clock: Clock, is_cut: bool) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    run.workers.is_at_work = False
    for rank in range(2):
        run.workers.tell(rank, status=0, ended_at=clock.now, has_ended=True, is_stored=True, is_cut=is_cut)
    if is_cut:
        assert isinstance(end(run), LimitReached)
    else:
        run.driver._direct(run.workers)
        assert run.driver._ended_for == "finished"


@pytest.mark.parametrize("is_restart", [False, True], ids=["first start", "restart"])
def test_run_without_ranks_at_its_limit_is_not_finished(run: Run, clock: Clock, is_restart: bool) -> None:
    """A placement group has nodes, and costs, before its workers are located."""
    if is_restart:
        run.until("running")
        run.workers.fail()
        assert run.decide()
    run.workers.ranks, run.workers.places, run.workers.statuses = [], [], {}
    run.driver._limit.count(is_running=True)
    clock.now += 3600
    assert str(end(run)).startswith(REACHED)
    assert run.driver._ended_for == "limit"


def test_stop_in_the_notice_is_a_stop(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    run.workers.events[len(run.workers.told) + 1] = stop
    with pytest.raises(KeyboardInterrupt):
        run.driver._direct(run.workers)
    assert isinstance(run.driver._error, Interrupted)


def test_lost_connection_in_the_notice_is_the_limit(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    run.workers.fails = GroupError("no head")
    with pytest.raises(LimitReached):
        run.driver._train_in(run.workers)


def test_workers_are_not_requested_at_the_limit(run: Run, clock: Clock) -> None:
    pass_time(run, clock, left=NOTICE_SECONDS - 1)
    with pytest.raises(LimitReached):
        run.driver._train_in_group()
    assert run.home.groups == []


def test_time_counts_from_the_first_start_on(run: Run, clock: Clock) -> None:
    """Neither the wait for places nor the installation of packages before the first start counts."""
    places, run.workers.places = run.workers.places, []
    run.workers.is_at_work = False
    for _ in range(5):
        clock.now += 1000
        run.step()
    run.workers.places, run.workers.is_at_work = places, True
    clock.now += 1000
    run.until("running")
    assert run.driver._limit.spent()["seconds"] == 0.0
    clock.now += 10
    run.step()
    assert run.driver._limit.spent() | {"usd": 0} == {"seconds": 10, "usd": 0, "hourly_usd": 0}


def test_restart_counts_while_workers_have_places(run: Run, clock: Clock) -> None:
    run.until("running")
    run.workers.fail()
    assert run.decide()
    clock.now += 10
    run.step()
    assert run.driver._limit.spent()["seconds"] == 10, "in the same places"
    run.workers.places = []
    run.step()
    clock.now += 1000
    run.step()
    assert run.driver._limit.spent()["seconds"] == 10, "without places"


def test_wait_of_a_program_does_not_count(run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run.home.allocation = None
    run.until("running")
    for is_waiting in (True, False):
        monkeypatch.setattr(type(run.record), "is_waiting", property(lambda record, waits=is_waiting: waits))
        run.step()
        clock.now += 50
        run.step()
    assert run.driver._limit.spent()["seconds"] == 50


@pytest.mark.parametrize("hours", [0.0, 2.0])
def test_end_by_dollars_needs_no_start_of_the_scripts(tmp_path: Path, clock: Clock, hours: float) -> None:
    """The instances cost also while packages are installed."""
    run = limited(Run(tmp_path, max_usd=1.0, max_hours=hours), clock)
    run.home.instances = lambda: {GPU: 2}  # ty: ignore[invalid-assignment]
    driver = run.driver
    driver.hours._count = run.home.instances
    run.workers.statuses = {rank: WorkerStatus() for rank in range(2)}
    run.workers.is_at_work = False
    for seconds in (0, 900, 800):  # two dollars an hour
        clock.now += seconds
        driver.hours.read(clock.now)
        driver._limit.look()
        assert run.step().action == "run"
    clock.now += 11
    assert run.step().action == "end", "also between two looks"
    run.workers.is_at_work = True
    error = end(run)
    assert isinstance(error, LimitReached)
    assert str(error).startswith("--max-usd 1 is reached: the run has spent 0.95 USD; ")


@pytest.mark.parametrize("lacks", [False, True])
def test_run_without_a_limit_goes_on(tmp_path: Path, clock: Clock, lacks: bool) -> None:
    run = limited(Run(tmp_path), clock)
    run.until("running")
    clock.now += 1e9
    assert run.step().action == "run"
    run.home.lacks = ResourceError("no GPU") if lacks else None
    assert run.step().end_at == (clock.now + 30 if lacks else 0.0)


def test_status_has_limits_and_what_is_spent(run: Run, clock: Clock) -> None:
    run.record.spent = run.driver._limit.spent
    run.until("running")
    clock.now += 60
    status: Any = run.record.status()
    assert (status["max_hours"], status["max_usd"]) == (1.0, None)
    assert status["spent"] == {"seconds": 60.0, "usd": 0.0, "hourly_usd": 0.0}
