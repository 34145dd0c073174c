"""The log of a job that is followed from before its driver has started."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.jobs import remote
from ray_on_ecs.jobs.documents import RUN, Documents, HeadState
from ray_on_ecs.jobs.record import FAILED, PENDING, REQUEST, SUCCEEDED, Job
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.storage.disk import Disk

METADATA = {"run_name": "mine", "storage_path": "runs"}


def job(request: str, **more: Any) -> Job:
    own = {"submission_id": "mine", "metadata": {**METADATA, REQUEST: request}, "start_time": 1, "uri": "", "log": ""}
    ends = {"status": PENDING, "end_time": None, "driver_exit_code": None, "message": None, "is_interrupted": False}
    return {**own, **ends, **more}


@pytest.mark.parametrize("by", ["job", "request"])
@pytest.mark.parametrize("end", [{"log": "first", "status": SUCCEEDED, "log_size": 5}, {"status": FAILED}])
def test_job_without_a_log_yet_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, end: dict[str, Any]
) -> None:
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.05)
    documents = Documents(Disk(), str(tmp_path))
    request = documents.write_request("jane", RUN, uri="runs/mine", metadata=METADATA)
    version = documents.write_head(HeadState(jobs=[job(request)] if by == "job" else []), None)
    shown: list[bytes] = []
    jobs = RemoteJobs(documents, lambda: "jane", print)
    job_id = "mine" if by == "job" else request
    follower = threading.Thread(target=jobs.tail, args=(job_id, shown.append), daemon=True)
    follower.start()
    follower.join(0.3)
    assert follower.is_alive()
    if "log" in end:
        documents.write_log("first", 0, b"lines")
    successor = job(request, submission_id="mine.2", log="second", start_time=2)  # of a lost one
    assert documents.write_head(HeadState(jobs=[job(request, **end), successor]), version)
    follower.join(60)
    assert not follower.is_alive()
    assert b"".join(shown) == (b"lines" if "log" in end else b"")
