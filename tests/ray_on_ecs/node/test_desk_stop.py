"""A head that is being stopped while its desk works in its thread: logs and state are whole for the next head."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.jobs import machine
from ray_on_ecs.jobs.documents import RUN, Documents, HeadState
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.node import desk
from ray_on_ecs.node.desk import Desk
from ray_on_ecs.storage.disk import Disk
from tests.waiting import until

# In the place of a run's driver: prints all the time, and a while after SIGTERM.
DRIVER = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
number = 0
while not asked or time.monotonic() < asked[0] + 1:
    number += 1
    print("line", number, flush=True)
    time.sleep(0.005)
sys.exit(130)
"""


class Slow(Documents):
    """Documents whose writes take a while, as those to S3 do."""

    seconds = 0.2

    def write_log(self, log: str, offset: int, content: bytes) -> None:
        time.sleep(self.seconds)
        super().write_log(log, offset, content)

    def write_head(self, state: HeadState, version: str | None) -> str | None:
        time.sleep(self.seconds)
        return super().write_head(state, version)


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MachineJobs]:
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER))
    monkeypatch.setattr(desk, "POLL_SECONDS", 0.05)
    jobs = MachineJobs(tmp_path / "head", is_head=True)
    yield jobs
    for job in jobs.list_jobs():
        jobs.kill_job(job["submission_id"])


def request(documents: Documents, name: str, folder: Path) -> str:
    metadata = {"run_name": name, "storage_path": str(folder)}
    return documents.write_request("AIDA:jane", RUN, uri=str(folder / name), metadata=metadata)


def log_of(documents: Documents, log: str) -> bytes:
    content = b""
    while part := documents.read_log(log, len(content)):
        content += part
    return content


def listed(documents: Documents) -> list[dict[str, Any]]:
    return documents.read_head()[1].jobs


def test_stop_beside_the_thread_keeps_logs_and_state_whole(drivers: MachineJobs, tmp_path: Path) -> None:
    documents = Slow(Disk(), str(tmp_path / "documents"))
    head = Desk(documents, drivers, dict)
    head.start()
    for name in ("one", "two"):
        request(documents, name, tmp_path)
    until(lambda: len(listed(documents)) == 2 and all(log_of(documents, job["log"]) for job in drivers.list_jobs()), 60)
    head.stop_jobs()
    jobs = drivers.list_jobs()
    assert [(job["status"], job["is_interrupted"]) for job in jobs] == 2 * [("FAILED", True)]
    for job in jobs:
        assert log_of(documents, job["log"]) == drivers.log_file(job).read_bytes()
    known = {job["submission_id"]: (job["status"], job["is_interrupted"], job["log_size"]) for job in listed(documents)}
    sizes = {job["submission_id"]: drivers.log_file(job).stat().st_size for job in jobs}
    assert known == {name: ("FAILED", True, size) for name, size in sizes.items()}
    assert head.is_current


def test_driver_that_starts_during_the_stop_is_stopped(
    drivers: MachineJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(Disk(), str(tmp_path / "documents"))
    head = Desk(documents, drivers, dict)
    submit, begins, goes_on = drivers.submit, threading.Event(), threading.Event()

    def late(*arguments: Any) -> str:
        begins.set()
        goes_on.wait()
        return submit(*arguments)

    monkeypatch.setattr(drivers, "submit", late)
    head.start()
    request(documents, "late", tmp_path)
    assert begins.wait(60)
    threading.Timer(0.3, goes_on.set).start()
    head.stop_jobs()
    [job] = drivers.list_jobs()
    assert (job["status"], job["is_interrupted"]) == ("FAILED", True)
    assert [(each["status"], each["is_interrupted"]) for each in listed(documents)] == [("FAILED", True)]
