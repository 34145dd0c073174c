"""The end of a Capacity Block is a notice, which follows an extension and survives a silent EC2."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_on_ecs.contract import BLOCK_VARIABLE, INSTANCE_FILE_VARIABLE, LIFECYCLE_STATE, NOTICES_FILE, REBALANCE
from ray_on_ecs.node import block, notice
from ray_on_ecs.node.notice import STORE_SECONDS
from ray_on_ecs.reservations import TERMINATED, WARNED
from tests.ec2_reservations import BLOCK_ID, Ec2
from tests.serving import serving

COMMAND_NAME = "ray-worker"
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ec2]:
    """EC2, and an instance in its Capacity Block, which ends in two days."""
    with serving(Ec2(NOW + timedelta(days=2))) as ec2:
        variables = {**ec2.variables, BLOCK_VARIABLE: BLOCK_ID, INSTANCE_FILE_VARIABLE: str(tmp_path / "instance.json")}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(notice, "_block", block.Block())
        monkeypatch.setattr(block, "LIMITS", {"connect_seconds": 60, "read_seconds": 60, "attempts": 1})
        yield ec2
        ec2.answers.set()
        if notice._block._asking:
            notice._block._asking.join()


def notices() -> notice.Notices:
    """Return the notices once EC2 has answered."""
    notice.of_node()
    if notice._block._asking:
        notice._block._asking.join()
    return notice.of_node()


def forget() -> None:
    """Let the last answer be old."""
    notice._block._asked_at = -math.inf


def test_block_ends_its_instances_half_an_hour_before_its_end(ec2: Ec2) -> None:
    last = (ec2.end - TERMINATED).timestamp()
    notices_now = notices()
    assert [event.at for event in notices_now.events] == [last]
    assert notices_now.end(last - WARNED.total_seconds() - 1) is None
    for now in (last - WARNED.total_seconds(), last, last + 3600, last + 86400):
        end = notices_now.end(now)
        assert end
        assert not end.is_event, "Auto Scaling would start another, which the Block does not get"
    assert (
        end.what
        == f"the end of this instance in Capacity Block {BLOCK_ID} at {ec2.end - TERMINATED:%Y-%m-%d %H:%M:%S} UTC"
    )


def test_node_is_drained_until_ec2_terminates_it(ec2: Ec2, capsys: pytest.CaptureFixture[str]) -> None:
    ec2.end = datetime.now(UTC).replace(microsecond=0) + TERMINATED + timedelta(minutes=9)
    drained: list[float] = []
    watch = notice.Watch(lambda: None, lambda deadline, why: drained.append(deadline), lambda: None)
    notices()
    watch.poll()
    watch.poll()
    assert drained == [(ec2.end - TERMINATED).timestamp() - STORE_SECONDS] * 2
    assert ec2.asked == 1
    scheduled, draining = capsys.readouterr().out.splitlines()
    assert scheduled.startswith(f"ray-worker: EC2 has scheduled the end of this instance in Capacity Block {BLOCK_ID}")
    assert draining.endswith(": draining this node")


def test_extension_moves_the_end(ec2: Ec2) -> None:
    [before] = notices().events
    ec2.end += timedelta(days=1)
    assert notices().events == (before,), "EC2 is not asked each second"
    forget()
    assert before.at
    assert [event.at for event in notices().events] == [before.at + 86400]


@pytest.mark.parametrize(
    "error", ["UnauthorizedOperation", "RequestLimitExceeded", "InvalidCapacityReservationId.NotFound"]
)
def test_last_end_stays_while_ec2_refuses(ec2: Ec2, error: str) -> None:
    before = notices().events
    ec2.error = error
    forget()
    assert notices().events == before


def test_ec2_that_never_answers_costs_one_line(ec2: Ec2, capsys: pytest.CaptureFixture[str]) -> None:
    ec2.error = "UnauthorizedOperation"
    for _ in range(3):
        assert notices() == notice.Notices()
        forget()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ray-worker: the look-up of the Capacity Block's end has failed (")
    assert "UnauthorizedOperation" in line


def test_notices_of_the_instance_count_beside_the_block(ec2: Ec2, tmp_path: Path) -> None:
    (tmp_path / NOTICES_FILE).write_text(json.dumps({LIFECYCLE_STATE: "Terminated"}))
    notices_now = notices()
    assert len(notices_now.ends) == len(notices_now.events) == 1
    end = notices_now.end(time.time())
    assert end
    assert "Terminated" in end.what


@pytest.mark.parametrize("is_known", [False, True])
def test_notice_counts_at_once_while_ec2_is_silent(ec2: Ec2, tmp_path: Path, is_known: bool) -> None:
    if is_known:
        notices()
        forget()
    ec2.answers.clear()
    drained: list[str] = []
    watch = notice.Watch(lambda: None, lambda deadline, why: drained.append(why), lambda: None)
    watch.poll()
    (tmp_path / NOTICES_FILE).write_text(json.dumps({LIFECYCLE_STATE: "Terminated"}))
    watch.poll()
    assert "Terminated" in drained[0]
    assert notice._block._asking
    assert notice._block._asking.is_alive(), "one question at a time"
    assert len(notice.of_node().events) == is_known


def test_scripts_read_the_notices_without_ec2(ec2: Ec2, tmp_path: Path) -> None:
    recommended = json.dumps({"noticeTime": "2026-01-02T03:04:05Z"})
    (tmp_path / NOTICES_FILE).write_text(json.dumps({REBALANCE: recommended}))
    assert notice.of_instance() == notice.Notices(recommendation="2026-01-02T03:04:05Z")
    assert ec2.asked == 0


def test_node_waits_for_the_end_of_its_block(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer counts, not the first look."""
    ec2.end = datetime.now(UTC) + TERMINATED + timedelta(minutes=9)
    pauses: list[float] = []

    def extend(seconds: float) -> None:
        pauses.append(seconds)
        ec2.end += timedelta(days=1)
        forget()
        notices()

    monkeypatch.setattr(notice, "BLOCK_SECONDS", 60.0)
    monkeypatch.setattr(notice, "time", SimpleNamespace(time=time.time, sleep=extend))
    notice.wait_for_end()
    assert len(pauses) == 1


def test_silent_ec2_delays_a_node_for_a_while(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "BLOCK_SECONDS", 0.2)
    ec2.answers.clear()
    notice.wait_for_end()


def test_instance_without_a_block_asks_nothing(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLOCK_VARIABLE)
    assert notices() == notice.Notices()
    assert ec2.asked == 0
