"""Requests for stacks: the file of a job, and the answers that the driver waits for."""

from pathlib import Path

import pytest

from ray_on_ecs.jobs.driver_parent import FOLDER_VARIABLE
from ray_on_ecs.jobs.record import STACKS_REQUEST
from ray_on_ecs.run import stacks_request as module
from ray_on_ecs.run.group import WorkerStatus
from ray_on_ecs.run.stacks import Stacks
from ray_on_ecs.run.stacks_request import ANSWER_SECONDS, StacksRequest
from tests.run_folders import Clock

FIRST, SECOND = "20261129-180000-00ff00ff", "20261129-180001-00ff00ff"
RUNS = WorkerStatus(started_at=1.0)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / STACKS_REQUEST


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_each_request_is_answered_once(file: Path) -> None:
    request = StacksRequest()
    assert request.wanted() == ""
    for name in (FIRST, SECOND):
        file.write_text(name)
        assert request.wanted() == name
        request.end()
        assert request.wanted() == ""


def test_request_to_an_earlier_driver_is_not_answered(file: Path) -> None:
    file.write_text(FIRST)
    assert StacksRequest().wanted() == ""


def test_second_request_waits_for_the_first(file: Path) -> None:
    request = StacksRequest()
    for name in (FIRST, SECOND):
        file.write_text(name)
        assert request.wanted() == FIRST
    request.end()
    assert request.wanted() == SECOND


@pytest.mark.parametrize("text", ["", "..", "../20261129-180000-0", "20261129-180000-", f"{FIRST}/x", f"{FIRST}\n"])
def test_name_of_another_form_is_not_a_request(file: Path, text: str) -> None:
    request = StacksRequest()
    file.write_text(text)
    assert request.wanted() == ""


def test_driver_without_a_job_has_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert StacksRequest().wanted() == ""


@pytest.mark.parametrize(
    ("worker", "is_there"),
    [
        (RUNS, False),
        (WorkerStatus(started_at=1.0, stacks=Stacks(SECOND)), False),
        (WorkerStatus(started_at=1.0, status=0), False),
        (WorkerStatus(started_at=1.0, stacks=Stacks(FIRST)), True),
        (WorkerStatus(), True),
        (WorkerStatus(started_at=1.0, has_ended=True), True),
    ],
    ids=["runs", "an earlier answer", "another node of MPI", "answer", "not started", "ended"],
)
def test_answer_is_there_once_all_that_run_have_answered(
    file: Path, clock: Clock, worker: WorkerStatus, is_there: bool
) -> None:
    request = StacksRequest()
    assert not request.are_there({0: worker})
    file.write_text(FIRST)
    request.wanted()
    assert request.are_there({0: WorkerStatus(started_at=1.0, stacks=Stacks(FIRST)), 1: worker}) is is_there
    clock.now += ANSWER_SECONDS + 1
    assert request.are_there({0: worker})
