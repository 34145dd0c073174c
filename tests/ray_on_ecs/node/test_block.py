"""The end of a Capacity Block is a notice, which follows an extension and survives a silent EC2."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ray_on_ecs import cluster_info
from ray_on_ecs.contract import BLOCK_VARIABLE, INSTANCE_FILE_VARIABLE, LIFECYCLE_STATE, NOTICES_FILE
from ray_on_ecs.node import block, notice
from ray_on_ecs.node.notice import STORE_SECONDS
from ray_on_ecs.node.outage import Outage
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
        monkeypatch.setattr(block, "_outage", Outage("the look-up of the Capacity Block's end", seconds=0))
        monkeypatch.setattr(cluster_info, "_answers", {})
        monkeypatch.setattr(block, "LIMITS", {"connect_seconds": 60, "read_seconds": 60, "attempts": 1})
        yield ec2


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last answer be old."""
    answers = {question: (answer, -math.inf) for question, (answer, _) in cluster_info._answers.items()}
    monkeypatch.setattr(cluster_info, "_answers", answers)


def test_block_ends_its_instances_half_an_hour_before_its_end(ec2: Ec2) -> None:
    last = (ec2.end - TERMINATED).timestamp()
    notices = notice.of_instance()
    assert [event.at for event in notices.events] == [last]
    assert notices.end(last - WARNED.total_seconds() - 1) is None
    for now in (last - WARNED.total_seconds(), last, last + 3600, last + 86400):
        end = notices.end(now)
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
    watch.poll()
    watch.poll()
    assert drained == [(ec2.end - TERMINATED).timestamp() - STORE_SECONDS] * 2
    assert ec2.asked == 1
    scheduled, draining = capsys.readouterr().out.splitlines()
    assert scheduled.startswith(f"ray-worker: EC2 has scheduled the end of this instance in Capacity Block {BLOCK_ID}")
    assert draining.endswith(": draining this node")


def test_extension_moves_the_end(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    before = notice.of_instance().events
    ec2.end += timedelta(days=1)
    assert notice.of_instance().events == before, "EC2 is not asked each second"
    forget(monkeypatch)
    assert notice.of_instance().events[0].at == before[0].at + 86400 if before[0].at else False


@pytest.mark.parametrize(
    "error", ["UnauthorizedOperation", "RequestLimitExceeded", "InvalidCapacityReservationId.NotFound"]
)
def test_last_end_stays_while_ec2_is_silent(ec2: Ec2, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    before = notice.of_instance().events
    ec2.error = error
    forget(monkeypatch)
    assert notice.of_instance().events == before


def test_ec2_that_never_answers_costs_one_line(
    ec2: Ec2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ec2.error = "UnauthorizedOperation"
    for _ in range(3):
        assert notice.of_instance() == notice.Notices()
        forget(monkeypatch)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ray-worker: the look-up of the Capacity Block's end has failed (")
    assert "UnauthorizedOperation" in line


def test_notices_of_the_instance_count_beside_the_block(ec2: Ec2, tmp_path: Path) -> None:
    (tmp_path / NOTICES_FILE).write_text(json.dumps({LIFECYCLE_STATE: "Terminated"}))
    notices = notice.of_instance()
    assert len(notices.ends) == len(notices.events) == 1
    end = notices.end(time.time())
    assert end
    assert "Terminated" in end.what


def test_instance_without_a_block_asks_nothing(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLOCK_VARIABLE)
    assert notice.of_instance() == notice.Notices()
    assert ec2.asked == 0
