"""A worker's side of the polls: answers that are lost, polls that arrive late, and a driver that is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_on_ecs.run import exchange as module
from ray_on_ecs.run.exchange import Exchange
from ray_on_ecs.run.group import Directive
from tests.run_folders import Clock
from tests.waiting import LIMIT_SECONDS, until

RUN, END = Directive(0), Directive(0, action="end")


@pytest.fixture
def exchange(clock: Clock) -> Exchange:
    """A worker whose script has been started."""
    exchange = Exchange()
    exchange.poll(1, RUN, -1, 0)
    exchange.begin(0)
    return exchange


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_lost_answer_is_made_good_at_once(exchange: Exchange) -> None:
    known = exchange.poll(2, RUN, -1, 0)[0]
    exchange.report(status=1)
    exchange.poll(3, RUN, known, 0)  # its answer is lost
    version, status = exchange.poll(4, RUN, known, LIMIT_SECONDS)
    assert (version > known, status.status) == (True, 1)


def test_change_answers_a_waiting_poll(exchange: Exchange) -> None:
    known = exchange.poll(2, RUN, -1, 0)[0]
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(exchange.poll, 3, RUN, known, LIMIT_SECONDS)
        until(lambda: exchange.poll_number == 3, between=0)
        exchange.report(step=7)  # which can wait
        assert not answer.done()
        exchange.report(has_ended=True)
        version, status = answer.result()
    assert (version, status.has_ended, status.step) == (known + 1, True, 7)


def test_next_poll_ends_the_wait_of_the_one_before(exchange: Exchange) -> None:
    known = exchange.poll(2, RUN, -1, 0)[0]
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(exchange.poll, 3, RUN, known, LIMIT_SECONDS)
        until(lambda: exchange.poll_number == 3, between=0)
        exchange.poll(4, END, known, 0)
        assert answer.result()[0] == known
    assert exchange.directive == END


def test_late_poll_brings_no_old_directive(exchange: Exchange) -> None:
    """An actor's threads may take two polls in any order."""
    later = Directive(1)
    exchange.poll(3, later, -1, 0)
    exchange.poll(2, END, -1, 0)
    assert (exchange.poll_number, exchange.directive) == (3, later)


def test_versions_grow_over_restarts(exchange: Exchange) -> None:
    versions = [exchange.poll(2, RUN, -1, 0)[0]]
    for generation in (1, 2):
        exchange.report(status=1, has_ended=True, is_stored=True, url="https://tracker", is_prepared=True)
        exchange.begin(generation)
        version, status = exchange.poll(3, RUN, -1, 0)
        versions.append(version)
        assert (status.generation, status.status) == (generation, None)
        assert (status.has_ended, status.is_stored) == (False, False)
        assert (status.url, status.is_prepared) == ("https://tracker", True)
    assert versions == sorted(set(versions))


def test_worker_wakes_for_a_directive(exchange: Exchange) -> None:
    woken = threading.Thread(target=exchange.wait, args=[LIMIT_SECONDS])
    woken.start()
    while woken.is_alive():
        exchange.poll(2, END, -1, 0)
        time.sleep(0.01)
    assert not exchange.is_to_run


@pytest.mark.parametrize(
    ("directive", "runs"), [(RUN, True), (END, False), (Directive(1), False), (Directive(-1), False)]
)
def test_script_runs_in_its_start_alone(exchange: Exchange, directive: Directive, runs: bool) -> None:
    exchange.poll(2, directive, -1, 0)
    assert exchange.is_to_run is runs


def test_lost_driver_ends_the_script(exchange: Exchange, clock: Clock) -> None:
    exchange.poll(2, RUN, -1, 0)
    for _ in range(int(module.DRIVER_LOST_SECONDS)):
        clock.now += 1
        assert exchange.is_to_run
    clock.now += 1
    assert exchange.has_lost_driver
    assert not exchange.is_to_run
    exchange.poll(3, RUN, -1, 0)
    assert exchange.is_to_run, "it was out of reach"


def test_stopped_worker_does_not_take_its_driver_for_lost(exchange: Exchange, clock: Clock) -> None:
    assert exchange.is_to_run
    clock.now += 10 * module.DRIVER_LOST_SECONDS
    assert exchange.is_to_run
