"""Work that the desk of a head that sleeps knows of, and the request for the next head at its end."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.errors import TrainingError
from ray_on_ecs.jobs import machine
from ray_on_ecs.jobs.documents import REQUESTS, STOP, Documents, Wake
from ray_on_ecs.jobs.record import SECRETS
from ray_on_ecs.node import desk
from ray_on_ecs.node.desk import Desk
from ray_on_ecs.node.idle import DESK, Idle, Sleep
from tests.ray_on_ecs.node.test_desk import DRIVER, JANE, Place, place, work
from tests.ray_on_ecs.node.test_desk_stories import kill_driver
from tests.waiting import until

__all__ = ["place"]  # a fixture

WAKE = Wake("ray-on-ecs/c", "us-west-2", 60.0)


class Noted(Idle):
    """An idle time that remembers the desk's last reason."""

    reason = "nothing is noted"
    minutes = 42.0

    def note(self, source: str, reason: str) -> None:
        assert source == DESK
        self.reason = reason


class Sleeper:
    """A head that sleeps, with an empty disk."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.monkeypatch = place, monkeypatch
        self.idle, self.asked = Noted(), 0
        place.head()
        sleep = Sleep(WAKE, self.idle, lambda: self.ask())
        self.desk = Desk(place.documents, place.heads[-1], lambda: {}, sleep=sleep)

    def ask(self) -> None:
        self.asked += 1

    def works(self, until_true: Callable[[], Any]) -> None:
        work(self.desk, until_true)

    @property
    def is_idle(self) -> bool:
        return not self.idle.reason

    def started(self, **more: str) -> str:
        """Let the head start a run, and return its request."""
        request = self.place.request(**more)
        self.works(self.place.starts)
        return request


@pytest.fixture
def head(place: Place, monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    """A head that has found nothing to do."""
    head = Sleeper(place, monkeypatch)
    head.works(lambda: head.is_idle)
    return head


def old_bell(head: Sleeper) -> None:
    head.monkeypatch.setattr(Documents, "requests", lambda documents: 1 / 0)
    head.place.documents.ring()


def silent_bucket(head: Sleeper) -> None:
    head.monkeypatch.setattr(type(head.place.documents.store), "find", lambda *_: 1 / 0)


def request_that_fails(head: Sleeper) -> None:
    head.monkeypatch.setattr(Desk, "_accept", lambda *_: 1 / 0)
    head.place.request()


def run(head: Sleeper) -> None:
    head.started()


def log_without_a_bucket(head: Sleeper) -> None:
    head.started()
    head.monkeypatch.setattr(Documents, "write_log", lambda *_: 1 / 0)
    head.place.end()


def lost_run(head: Sleeper) -> None:
    head.started(max_resubmissions="1", resubmissions="1")  # it may have made progress since
    head.monkeypatch.setattr(Desk, "_resubmit", lambda *_: 1 / 0)
    kill_driver(head.place, "mine")


def end_after_the_last_state(head: Sleeper) -> None:
    head.started()
    head.monkeypatch.setattr(head.desk, "_write", lambda: True)
    head.place.end()


def state_without_a_bucket(head: Sleeper) -> None:
    head.monkeypatch.setattr(Documents, "write_head", lambda *_: 1 / 0)
    head.desk._has_changed = True


def secrets_that_stay(head: Sleeper) -> None:
    def refuse(uri: str) -> None:
        raise TrainingError("denied")

    head.monkeypatch.setattr(desk.secrets, "store", refuse)
    head.place.end()
    head.started(**{SECRETS: json.dumps([str(head.place.folder / "mine"), "TOKEN"])})


def jobs_that_are_not_known(head: Sleeper) -> None:
    head.monkeypatch.setattr(head.desk, "_jobs", SimpleNamespace(list_jobs=lambda: 1 / 0))


BUSY: dict[Any, str] = {
    run: "a run is under way",
    request_that_fails: "a request is open",
    old_bell: "a request is open",
    silent_bucket: "a request is open",
    log_without_a_bucket: "a log is not stored",
    lost_run: "a lost run is submitted again",
    end_after_the_last_state: "the state is not stored",
    state_without_a_bucket: "the state is not stored",
    secrets_that_stay: "the secrets of a run are not deleted",
    jobs_that_are_not_known: "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("begin", BUSY, ids=lambda begin: begin.__name__)
def test_desk_knows_what_keeps_the_head_awake(head: Sleeper, begin: Any) -> None:
    begin(head)
    head.works(lambda: head.idle.reason == BUSY[begin])
    for _ in range(3):
        head.desk.work()
    assert head.idle.reason == BUSY[begin]


@pytest.mark.parametrize("ends", [0, 1, 2, 130])
def test_head_is_idle_once_all_of_a_run_is_stored(head: Sleeper, ends: int) -> None:
    head.started()
    head.place.end(status=ends)
    head.works(lambda: head.is_idle)
    head.place.lose_head()
    later = Sleeper(head.place, head.monkeypatch)
    later.works(lambda: later.is_idle)
    assert head.place.user().log("mine") == "begins\nends\n"
    assert [job["driver_exit_code"] for job in head.place.listed().values()] == [ends]


def test_head_is_idle_once_a_run_is_lost_for_good(head: Sleeper) -> None:
    head.started(max_resubmissions="0")
    kill_driver(head.place, "mine")
    head.works(lambda: head.is_idle)


def test_head_is_busy_until_it_has_taken_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Sleeper(place, monkeypatch)
    monkeypatch.setattr(Documents, "read_head", lambda documents: 1 / 0)
    head.desk.work()
    assert head.idle.reason == "the state of the head before is not read"


def test_head_that_a_later_one_replaces_minds_its_own_runs(head: Sleeper) -> None:
    head.started()
    later = Sleeper(head.place, head.monkeypatch)
    later.works(lambda: later.desk.is_current)
    head.desk._has_changed = True
    head.works(lambda: not head.desk.is_current)
    head.place.documents.write_request(JANE, STOP, jobs=[])
    head.desk.work()
    assert head.idle.reason == "a run is under way"
    head.place.end()
    head.works(lambda: head.is_idle)


def test_request_that_is_answered_at_once_is_noted(head: Sleeper) -> None:
    reasons: list[str] = []
    head.monkeypatch.setattr(Noted, "note", lambda idle, source, reason: reasons.append(reason))
    head.place.documents.write_request(JANE, STOP, jobs=[])
    head.works(lambda: not head.place.documents.requests())
    assert "a request is answered" in reasons


def test_request_of_a_check_is_not_work(head: Sleeper) -> None:
    reasons: list[str] = []
    head.monkeypatch.setattr(Noted, "note", lambda idle, source, reason: reasons.append(reason))
    head.place.user().check_requests()
    head.works(lambda: not head.place.documents.requests())
    assert set(reasons) <= {""}


def test_secrets_that_stay_keep_the_head_awake_for_a_time(head: Sleeper) -> None:
    secrets_that_stay(head)
    head.works(lambda: head.idle.reason == BUSY[secrets_that_stay])
    head.monkeypatch.setattr(desk, "SECRETS_BUSY_SECONDS", 0.1)
    head.works(lambda: head.is_idle)


def test_state_has_what_wakes_the_head(head: Sleeper) -> None:
    head.desk._has_changed = True
    head.desk.work()
    state = head.place.documents.read_head()[1]
    assert (state.wake, state.idle_minutes) == (WAKE, 42.0)


# The end


def stop(head: Sleeper) -> int:
    head.desk._stopping.set()
    assert head.desk.stop_jobs() is signal.SIGTERM
    return head.asked


def test_look_under_way_does_not_end_the_idle_time(head: Sleeper) -> None:
    why, looks = head.desk._why_busy, threading.Event()

    def look() -> str:
        looks.set()
        until(lambda: head.desk._stopping.is_set() and head.desk._has_changed)
        return why()

    head.monkeypatch.setattr(head.desk, "_why_busy", look)
    head.desk.start()
    assert looks.wait(10)
    assert stop(head) == 0
    head.desk._thread.join()
    assert head.is_idle


def test_head_with_a_run_wakes_the_next_one_at_once(head: Sleeper) -> None:
    """Before its driver has ended: the container may be killed meanwhile."""
    head.monkeypatch.setattr(
        machine, "DRIVER", ("-c", DRIVER.replace("sys.exit(130)", "time.sleep(1) or sys.exit(130)"))
    )
    head.started()
    running: list[int] = []
    head.monkeypatch.setattr(head, "ask", lambda: running.append(len(head.desk._running())))
    stop(head)
    assert running == [1, 0]


def test_head_wakes_the_next_one_for_the_last_request(head: Sleeper) -> None:
    head.place.request()
    assert stop(head) == 1
    assert len(head.place.documents.requests()) == 1


def test_head_wakes_the_next_one_if_requests_are_not_known(head: Sleeper) -> None:
    head.monkeypatch.setattr(Documents, "requests", lambda documents: 1 / 0)
    assert stop(head) == 1


def test_head_stops_though_the_request_fails(head: Sleeper, caplog: pytest.LogCaptureFixture) -> None:
    head.place.request()
    head.monkeypatch.setattr(head, "ask", lambda: 1 / 0)
    stop(head)
    assert "the next head is not woken; a request of a user does that" in caplog.text


@pytest.mark.parametrize("age", [0.0, desk.DAY - 60, desk.DAY * 3])
def test_head_that_wakes_has_all_of_the_one_before(head: Sleeper, age: float) -> None:
    """With an empty disk, also after a weekend; a request that waits is answered."""
    head.place.end("ended", 1)
    head.place.request("ended")
    head.works(lambda: head.is_idle and "ended" in head.place.listed())
    stop(head)
    old = time.time() - age
    os.utime(head.place.documents.path("head.json"), (old, old))
    before = head.place.user().list_jobs()
    request = head.place.request()
    later = Sleeper(head.place, head.monkeypatch)
    later.works(head.place.starts)
    assert Path(head.place.documents.path(REQUESTS, JANE, f"{request}.json")).exists() is False
    listed = head.place.listed()
    assert [(job["status"], job.get("message")) for job in before] == [("FAILED", None)]
    assert [listed[name]["status"] for name in ("ended", "mine")] == ["FAILED", "RUNNING"]
    assert head.place.user().log("ended") == "begins\nends\n"
    assert len(head.place.starts("ended")) == 1
