"""Each notice of AWS has its meaning, and the end of an instance releases its task, drains its node, and holds."""

import json
import os
import threading
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.contract import (
    INSTANCE_FILE_VARIABLE,
    LIFECYCLE_STATE,
    NOTICES_FILE,
    REBALANCE,
    SCHEDULED_EVENTS,
    SPOT_ACTION,
)
from ray_on_ecs.node import notice
from ray_on_ecs.node.notice import (
    DRAIN_SECONDS,
    EVENT_CODES,
    EVENT_SECONDS,
    LIFECYCLE_ENDS,
    OLD_SECONDS,
    SPOT_ACTIONS,
    STORE_SECONDS,
    SURVIVED_SECONDS,
    End,
    Notices,
    Watch,
)

COMMAND_NAME = "ray-worker"

# 2017-09-18T08:20:00Z: two minutes before the time in the notices.
NOW = 1505722800.0
AT = "2017-09-18T08:22:00Z"


def spot(action: str = "terminate", at: str | None = AT) -> str:
    return json.dumps({"action": action, "time": at} if at else {"action": action})


def event(code: str = "system-reboot", state: str = "active", at: str = "18 Sep 2017 08:22:00 GMT") -> dict[str, str]:
    described = {"Description": "scheduled reboot", "EventId": "instance-event-0d59937288b749b32"}
    return {"NotBefore": at, "NotAfter": "18 Sep 2017 09:17:23 GMT", "Code": code, "State": state, **described}


def events(*each: dict[str, str]) -> str:
    return json.dumps(each)


@pytest.mark.parametrize("action", SPOT_ACTIONS)
def test_spot_interruption_ends_the_instance_at_its_time(action: str) -> None:
    what = f"EC2 {SPOT_ACTIONS[action]} this Spot Instance"
    at_time = End(f"{what} at 2017-09-18 08:22:00 UTC", NOW + 120)
    assert notice.parse({SPOT_ACTION: spot(action)}) == Notices(ends=(at_time,))
    assert notice.parse({SPOT_ACTION: spot(action, at=None)}) == Notices(ends=(End(what, None),))


@pytest.mark.parametrize("state", [*LIFECYCLE_ENDS, "InService", "Detached", "Standby", "Warmed:Running"])
def test_lifecycle_state_ends_the_instance_without_a_time(state: str) -> None:
    end = notice.parse({LIFECYCLE_STATE: state}).end(NOW)
    assert (end is not None) == (state in LIFECYCLE_ENDS)
    assert end is None or (state in end.what and end.at is None)


@pytest.mark.parametrize("code", EVENT_CODES)
@pytest.mark.parametrize(("state", "is_due"), [("active", True), ("completed", False), ("canceled", False)])
def test_active_event_is_an_end_shortly_before_its_time(code: str, state: str, is_due: bool) -> None:
    at, notices = NOW + 120, notice.parse({SCHEDULED_EVENTS: events(event(code, state))})
    assert [(each.at, code in each.what) for each in notices.events] == ([(at, True)] if is_due else [])
    assert notices.end(at - EVENT_SECONDS - 1) is None
    for now in (at - EVENT_SECONDS, at + SURVIVED_SECONDS):
        assert (notices.end(now) is not None) == is_due
    assert notices.end(at + SURVIVED_SECONDS + 1) is None, "a maintenance window may last hours"


def test_first_end_with_a_time_counts() -> None:
    early, late = event(at="18 Sep 2017 08:21:00 GMT"), event(at="18 Sep 2017 08:21:30 GMT")
    texts = {SPOT_ACTION: spot(), LIFECYCLE_STATE: "Terminated", SCHEDULED_EVENTS: events(late, early)}
    ended = notice.parse(texts).end(NOW)
    assert ended
    assert ended.at == NOW + 60


def test_recommendation_ends_nothing() -> None:
    notices = notice.parse({REBALANCE: '{"noticeTime": "2020-10-27T08:22:00Z"}', LIFECYCLE_STATE: "InService"})
    assert notices == Notices(recommendation="2020-10-27T08:22:00Z")
    assert notices.end(NOW) is None


FOREIGN = ["", "{", "[]", "[[]]", "[{}]", "null", "1", '"text"', "<html>", '{"action": "terminate"', '{"time": []}']
FOREIGN += [spot("reboot"), '{"action": ["terminate"]}', '{"noticeTime": "soon"}', '{"noticeTime": 1}', "[" * 100_000]
FOREIGN += [events(event("instance-paint")), events(event(state="planned")), events(event(at="soon"))]
FOREIGN += ['[{"Code": [], "State": {}, "NotBefore": "21 Jan 2019 09:00:43 GMT"}]', "Terminating", "InService "]


@pytest.mark.parametrize("text", FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_text_means_nothing(text: str) -> None:
    paths = (SPOT_ACTION, REBALANCE, LIFECYCLE_STATE, SCHEDULED_EVENTS)
    assert notice.parse(dict.fromkeys(paths, text)) == Notices()


@pytest.mark.parametrize("texts", [None, [], "text", {SPOT_ACTION: 1, SCHEDULED_EVENTS: [event()], REBALANCE: {}}])
def test_foreign_document_means_nothing(texts: object) -> None:
    assert notice.parse(texts) == Notices()


@pytest.mark.parametrize(
    ("at", "deadline"),
    [
        (120, 120 - STORE_SECONDS),  # a Spot interruption
        (300, 300 - STORE_SECONDS),
        (20, 10),  # half of what is left, if that is little
        (0, DRAIN_SECONDS),
        (-5, DRAIN_SECONDS),
        (None, DRAIN_SECONDS),
    ],
)
def test_deadline_leaves_time_to_store(monkeypatch: pytest.MonkeyPatch, at: float | None, deadline: float) -> None:
    monkeypatch.delenv(notice.DRAIN_VARIABLE, raising=False)
    assert notice.deadline_of(End("x", None if at is None else NOW + at), NOW) == NOW + deadline


class Instance:
    """An instance whose clock the test sets, with its file; calls of the watch on its node.

    Attributes:
        calls: The calls, with the deadlines from now in seconds.
        failures: The errors of the next calls.
    """

    def __init__(self, file: Path) -> None:
        self.now, self.file = NOW, file
        self.calls: list[tuple[str, float]] = []
        self.failures: list[Exception] = []
        self.replaced = threading.Event()
        self.watch = Watch(
            lambda: self._call("release", 0),
            lambda deadline, why: self._call("drain", deadline - NOW),
            self.replaced.set,
        )

    def time(self) -> float:
        return self.now

    def _call(self, name: str, deadline: float) -> None:
        self.calls.append((name, deadline))
        if self.failures:
            raise self.failures.pop(0)

    def tell(self, texts: Any) -> None:
        self.file.write_text(texts if isinstance(texts, str) else json.dumps(texts))
        os.utime(self.file, (self.now, self.now))

    def polls(self, texts: Any, seconds: int = 1) -> list[tuple[str, float]]:
        """Poll each second with a file of that second; return the calls."""
        self.calls = []
        for _ in range(seconds):
            self.tell(texts)
            self.watch.poll()
            self.now += 1
        return self.calls


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Instance:
    machine = Instance(tmp_path / NOTICES_FILE)
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(tmp_path / "instance.json"))
    monkeypatch.delenv(notice.DRAIN_VARIABLE, raising=False)
    monkeypatch.setattr(notice, "time", machine)
    return machine


QUIET = {LIFECYCLE_STATE: "InService"}
SPOT = {**QUIET, SPOT_ACTION: spot()}


def test_task_is_released_once_and_its_node_drained_until_the_deadline(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instance.polls(QUIET, 5) == []
    first, *then = instance.polls(SPOT, 200)
    assert first == ("release", 0)
    assert set(then) == {("drain", 120 - STORE_SECONDS)}, "another head would not know of it"
    assert len(then) == 120 - STORE_SECONDS - 5, "after the deadline nothing is to be said"
    output = capsys.readouterr().out.splitlines()
    assert output == ["ray-worker: EC2 terminates this Spot Instance at 2017-09-18 08:22:00 UTC: draining this node"]


@pytest.mark.parametrize("then", [QUIET, {}, "", '{"spot', "null"])
def test_end_of_an_instance_holds(instance: Instance, then: object) -> None:
    instance.polls(SPOT)
    assert instance.polls(then) == [("drain", 120 - STORE_SECONDS)]
    instance.file.unlink()
    instance.watch.poll()
    assert instance.calls[-1] == ("drain", 120 - STORE_SECONDS)


def test_only_an_earlier_deadline_replaces_one(instance: Instance) -> None:
    terminated = {LIFECYCLE_STATE: "Terminated"}
    assert instance.polls(terminated) == [("release", 0), ("drain", DRAIN_SECONDS)]
    assert instance.polls(terminated) == [("drain", DRAIN_SECONDS)]
    sooner = {**terminated, SPOT_ACTION: spot(at="2017-09-18T08:21:30Z")}
    assert instance.polls(sooner) == [("drain", 90 - STORE_SECONDS)]
    assert instance.polls({**terminated, SPOT_ACTION: spot()}) == [("drain", 90 - STORE_SECONDS)]


def due_in(seconds: float) -> dict[str, str]:
    """Return the texts of an instance with an event in some seconds."""
    at = format_datetime(datetime.fromtimestamp(NOW + seconds, UTC), usegmt=True)
    return {**QUIET, SCHEDULED_EVENTS: events(event(at=at))}


def test_end_without_a_time_is_not_hidden_by_a_later_event(instance: Instance) -> None:
    texts = {**due_in(280), LIFECYCLE_STATE: "Terminated"}
    assert instance.polls(texts) == [("release", 0), ("drain", DRAIN_SECONDS)]


def test_sigterm_does_not_lengthen_a_deadline(instance: Instance) -> None:
    assert instance.polls(due_in(280))[-1] == ("drain", 280 - STORE_SECONDS)
    instance.watch.stopping()
    assert instance.polls(due_in(280)) == [("drain", 1 + DRAIN_SECONDS)]


def test_sigterm_without_a_notice_sets_no_deadline(instance: Instance) -> None:
    instance.watch.stopping()
    assert instance.polls(QUIET, 3) == []


def test_instance_with_a_scheduled_event_is_replaced(instance: Instance) -> None:
    """Neither ECS nor EC2 Auto Scaling does it, and the task would wait on the instance."""
    instance.polls(due_in(EVENT_SECONDS + 60), 2)
    assert not instance.replaced.is_set()
    instance.polls(due_in(EVENT_SECONDS), 2)
    assert instance.replaced.wait(10)


@pytest.mark.parametrize("texts", [SPOT, {LIFECYCLE_STATE: "Terminated"}], ids=["spot", "lifecycle"])
def test_others_are_replaced_by_aws(instance: Instance, texts: dict[str, str]) -> None:
    assert instance.polls(texts, 2)
    assert not instance.replaced.is_set()


def test_instance_that_survived_its_event_is_used_again(instance: Instance) -> None:
    assert instance.polls(due_in(-SURVIVED_SECONDS - 1)) == []
    notice.wait_for_end()


def test_agent_that_hangs_holds_up_no_drain(instance: Instance) -> None:
    goes_on = threading.Event()
    drained: list[float] = []

    def release() -> None:
        goes_on.wait(30)

    watch = Watch(release, lambda deadline, why: drained.append(deadline), lambda: None)
    instance.tell(SPOT)
    watch.poll()
    watch.poll()
    assert len(drained) == 2
    goes_on.set()


@pytest.mark.parametrize("text", ["90s", "ninety", ""])
def test_drain_time_that_is_no_number_is_the_default(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(notice.DRAIN_VARIABLE, text)
    assert notice.deadline_of(End("x", None), NOW) == NOW + DRAIN_SECONDS


def test_failures_are_tried_again_and_cost_a_line_each(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    instance.failures = [OSError("the agent is busy"), OSError("the GCS is starting")] * 3
    calls = instance.polls(SPOT, 4)
    assert [name for name, _ in calls] == ["release", "drain"] * 4
    assert [name for name, _ in instance.polls(SPOT)] == ["drain"]
    assert capsys.readouterr().err.splitlines() == [
        "ray-worker: the release of this task's protection has failed (OSError: the agent is busy); trying again",
        "ray-worker: the drain of this node has failed (OSError: the GCS is starting); trying again",
        "ray-worker: the release of this task's protection works again",
        "ray-worker: the drain of this node works again",
    ]


@pytest.mark.parametrize("texts", ["", "{", '{"spot/instance-action": "{\\"acti', "[]", "\x00"])
def test_half_written_file_does_nothing(instance: Instance, capsys: pytest.CaptureFixture[str], texts: str) -> None:
    assert instance.polls(texts) == []
    assert capsys.readouterr() == ("", "")


def test_absent_or_old_file_does_nothing(instance: Instance) -> None:
    instance.watch.poll()
    instance.tell(SPOT)
    instance.now += OLD_SECONDS + 1  # of before a reboot
    instance.watch.poll()
    instance.file.write_bytes(b"\xff\xfe")
    os.utime(instance.file, (instance.now, instance.now))
    instance.watch.poll()
    assert instance.calls == []


def test_events_days_ahead_and_recommendations_are_said_once(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = events(event("instance-retirement", at="28 Sep 2017 08:22:00 GMT"))
    texts = {SCHEDULED_EVENTS: ahead, REBALANCE: '{"noticeTime": "2017-09-18T08:19:58Z"}'}
    assert instance.polls(texts, 5) == []
    retirement, recommendation = capsys.readouterr().out.splitlines()
    assert retirement == (
        "ray-worker: EC2 has scheduled instance-retirement of this instance at 2017-09-28 08:22:00 UTC"
    )
    assert recommendation.startswith("ray-worker: EC2 recommends since 2017-09-18T08:19:58Z to replace this instance")


def test_ending_instance_is_not_joined(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    instance.tell({LIFECYCLE_STATE: "Terminated"})
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        instance.tell({LIFECYCLE_STATE: "Terminated" if len(pauses) < 3 else "InService"})

    monkeypatch.setattr(instance, "sleep", sleep, raising=False)
    notice.wait_for_end()
    assert len(pauses) == 3
    notice.wait_for_end()
    assert len(pauses) == 3


@pytest.mark.parametrize(("file", "threads"), [("/run/instance/instance.json", 1), (None, 0)])
def test_nothing_is_watched_elsewhere(monkeypatch: pytest.MonkeyPatch, file: str | None, threads: int) -> None:
    begun: list[threading.Thread] = []
    monkeypatch.delenv(INSTANCE_FILE_VARIABLE, raising=False)
    if file:
        monkeypatch.setenv(INSTANCE_FILE_VARIABLE, file)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))
    notice.start(lambda: None, lambda deadline, why: None, lambda: None)
    assert len(begun) == threads
