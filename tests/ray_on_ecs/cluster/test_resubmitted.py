"""A follower waits for the head to submit a lost run again, also while the head itself is replaced."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cluster import jobs
from ray_on_ecs.jobs import remote
from ray_on_ecs.jobs.documents import Documents, HeadState
from ray_on_ecs.jobs.record import FAILED, MAX_RESUBMISSIONS, RESUBMISSIONS, RUNNING, STOPPED, Job
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.storage.disk import Disk

RUN = {"run_name": "mine", "storage_path": "runs"}
LIMIT, AWAY = 2.0, 0.3


class Place:
    """The documents of a cluster whose head is stopped and replaced."""

    def __init__(self, folder: Path) -> None:
        self.documents, self.said = Documents(Disk(), str(folder)), list[str]()
        self.jobs = RemoteJobs(self.documents, lambda: "AIDA:jane", self.said.append)

    def write(self, *listed: Job) -> None:
        version, _ = self.documents.read_head()
        assert self.documents.write_head(HeadState(jobs=list(listed)), version)

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(jobs, "RESUBMISSION_SECONDS", LIMIT)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(remote, "AWAY_SECONDS", AWAY)
    return Place(tmp_path)


def job(number: int = 1, **more: Any) -> Job:
    metadata = {**RUN, MAX_RESUBMISSIONS: "3", RESUBMISSIONS: str(number - 1)}
    own = {"submission_id": f"mine.{number}", "metadata": metadata, "start_time": number}
    ends = {"status": RUNNING, "end_time": None, "driver_exit_code": None, "message": None, "is_interrupted": False}
    return {**own, **ends, "uri": "", "log": f"log-{number}", **more}


KILLED: dict[str, Any] = {"status": FAILED, "driver_exit_code": -9}
INTERRUPTED: dict[str, Any] = {"status": FAILED, "driver_exit_code": 130, "is_interrupted": True}


@pytest.mark.parametrize("lost", [KILLED, INTERRUPTED])
def test_follower_waits_for_the_next_head(
    place: Place, capsys: pytest.CaptureFixture[str], lost: dict[str, Any]
) -> None:
    place.write(job(**lost))
    began = time.monotonic()
    place.after(1.5 * LIMIT, lambda: (place.write(job(**lost)), place.write(job(**lost), job(2))))
    assert jobs.resubmitted(place.jobs, RUN, job(**lost)) == "mine.2"
    assert time.monotonic() - began > 1.5 * LIMIT
    assert capsys.readouterr().out == "waiting for the next head, which submits run mine again\n"


def test_follower_gives_up_if_a_head_that_is_there_does_not_submit_it(place: Place) -> None:
    place.write(job(**KILLED))
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(AWAY / 6):
            place.write(job(**KILLED))

    writer = threading.Thread(target=write)
    writer.start()
    began = time.monotonic()
    try:
        assert jobs.resubmitted(place.jobs, RUN, job(**KILLED)) is None
    finally:
        stop.set()
        writer.join()
    assert time.monotonic() - began < 20 * LIMIT


def test_follower_gives_up_if_no_head_comes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEAD_SECONDS", LIMIT)
    place.write(job(**KILLED))
    began = time.monotonic()
    assert jobs.resubmitted(place.jobs, RUN, job(**KILLED)) is None
    assert time.monotonic() - began > 1.5 * LIMIT


@pytest.mark.parametrize(
    "ended",
    [
        {"status": STOPPED, "driver_exit_code": 130},
        {"status": FAILED, "driver_exit_code": 1},
        {**KILLED, "metadata": {**RUN, MAX_RESUBMISSIONS: "0"}},
        {**INTERRUPTED, "metadata": RUN},
    ],
)
def test_follower_of_a_run_that_is_not_submitted_again_does_not_wait(place: Place, ended: dict[str, Any]) -> None:
    place.write(job(**ended))
    assert jobs.resubmitted(place.jobs, RUN, job(**ended)) is None


@pytest.mark.parametrize(
    "later",
    [
        (job(**KILLED, is_settled=True),),
        (job(status=STOPPED, driver_exit_code=-9),),
        (job(**KILLED, is_settled=True), job(2, metadata={**RUN, MAX_RESUBMISSIONS: "3"})),  # the user's own
    ],
)
def test_follower_of_a_lost_run_that_is_stopped_or_settled_does_not_wait(place: Place, later: tuple[Job, ...]) -> None:
    place.write(*later)
    began = time.monotonic()
    assert jobs.resubmitted(place.jobs, RUN, job(**KILLED)) is None
    assert time.monotonic() - began < LIMIT
