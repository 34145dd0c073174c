"""Stops, lost runs and broken documents over heads that come and go: nothing starts against the user's will."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import ResourceError, TrainingError
from ray_on_ecs.jobs import machine, remote
from ray_on_ecs.jobs.documents import HEAD, REQUESTS, RUN, Documents
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED, SECRETS
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.node import desk
from ray_on_ecs.node.desk import Desk
from ray_on_ecs.secrets import Store
from ray_on_ecs.storage.bucket import StorageFault
from tests.ray_on_ecs.node.test_desk import DRIVER, JANE, Place, begun, current, place, work
from tests.ray_on_ecs.node.test_desk_stop import log_of
from tests.waiting import until

__all__ = ["place"]  # a fixture


def kill_driver(place: Place, job_id: str) -> None:
    jobs = place.heads[-1]
    folder, _ = jobs._find(job_id)
    os.kill(machine._document(folder / machine.PROCESSES)["driver"][0], signal.SIGKILL)
    until(lambda: jobs.job(job_id)["status"] in ENDED)


def looks(head: Desk, times: int = 4) -> None:
    for _ in range(times):
        head.work()


@pytest.mark.parametrize("heads", [1, 2])
def test_stopped_run_stays_stopped_once_its_job_is_forgotten(place: Place, heads: int) -> None:
    """A head forgets old jobs; the lost job before it is older, and is settled."""
    begun(place)
    place.lose_head()
    later = place.head()
    work(later, lambda: len(place.starts()) == 2)
    place.user().stop_job("mine.2")
    work(later, lambda: place.listed()["mine.2"]["status"] == "STOPPED")
    shutil.rmtree(place.heads[-1].log_file(place.heads[-1].job("mine.2")).parent)
    if heads == 2:
        work(later, lambda: "mine.2" not in place.listed())
        later = place.head()
    looks(later)
    assert len(place.starts()) == 2
    assert place.listed()["mine"]["is_settled"]


def test_stop_outlives_the_head_that_has_read_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER.replace("lambda *_: sys.exit(130)", "signal.SIG_IGN")))
    head = begun(place)
    place.user().stop_job("mine")
    work(head, lambda: not place.documents.requests())
    assert place.listed()["mine"]["status"] == "RUNNING"
    place.lose_head()
    later = place.head()
    looks(later)
    assert place.listed()["mine"]["status"] == "STOPPED"
    assert len(place.starts()) == 1


def test_stop_request_stays_until_the_state_has_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = begun(place)
    monkeypatch.setattr(Desk, "_write", lambda head: False)
    place.user().stop_job("mine")
    looks(head)
    assert len(place.documents.requests()) == 1


def test_stop_of_a_job_stops_the_one_that_continues_it(place: Place) -> None:
    head = begun(place)
    kill_driver(place, "mine")
    work(head, lambda: len(place.starts()) == 2)
    place.user().stop_job("mine")
    work(head, lambda: place.listed()["mine.2"]["status"] == "STOPPED")
    looks(head)
    assert len(place.starts()) == 2


def test_stop_leaves_a_later_run_of_the_name_alone(place: Place) -> None:
    head = begun(place)
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    (place.folder / "mine" / "end").unlink()
    place.request()
    work(head, lambda: len(place.starts()) == 2)
    place.user().stop_job("mine")
    looks(head)
    assert place.listed()["mine.2"]["status"] == "RUNNING"


def test_stop_of_a_request_that_could_not_be_answered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    monkeypatch.setattr(Desk, "_accept", lambda *_: 1 / 0)
    request = place.request()
    place.user("AROAEXAMPLE:joe").stop_job(request)  # who can't withdraw it
    head.work()
    monkeypatch.undo()
    looks(head)
    assert not place.documents.requests()
    assert place.documents.read_head()[1].refused[request] == "the run was stopped before it began"
    assert not place.starts()


def test_lost_run_is_not_resubmitted_before_the_stops_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(place)
    place.lose_head()
    place.user().stop_job("mine")
    later = place.head()
    requests = Documents.requests
    monkeypatch.setattr(Documents, "requests", lambda documents: 1 / 0)
    looks(later)
    assert len(place.starts()) == 1
    monkeypatch.setattr(Documents, "requests", requests)
    looks(later)
    assert place.listed()["mine"]["status"] == "STOPPED"
    assert len(place.starts()) == 1


def test_state_is_that_of_the_head_before_until_ray_is_up(place: Place) -> None:
    begun(place)
    place.lose_head()
    place.heads.append(MachineJobs(place.folder / "next", is_head=True))
    is_up = False
    later = Desk(place.documents, place.heads[-1], dict, lambda: is_up)
    looks(later)
    assert place.listed()["mine"]["status"] == "RUNNING"
    is_up = True
    work(later, lambda: place.listed().get("mine.2", {}).get("status") == "RUNNING")


def test_runs_of_a_name_below_two_paths_have_different_jobs(place: Place) -> None:
    head = place.head()
    for path in ("a", "b"):
        uri = str(place.folder / path / "mine")
        metadata = {**place.metadata(), "storage_path": str(place.folder / path)}
        place.documents.write_request(JANE, RUN, uri=uri, metadata=metadata)
        work(head, lambda path=path: place.starts(f"{path}/mine"))
    place.lose_head()
    later = place.head()
    work(later, lambda: all(len(place.starts(f"{path}/mine")) == 2 for path in ("a", "b")))
    assert place.listed().keys() == {"mine", "mine.2", "mine.3", "mine.4"}


def test_command_in_the_shell_of_a_new_head_takes_a_free_id(place: Place) -> None:
    head = begun(place)
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    current(place)
    jobs = place.heads[-1]
    with jobs.submitting():
        assert jobs.submit(str(place.folder / "mine"), place.metadata()) == "mine.2"


# Requests


@pytest.mark.parametrize("fails", ["_write", "ring"])
def test_request_whose_answer_is_lost_is_withdrawn(place: Place, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    original = getattr(Documents, fails)

    def lose(*arguments: Any) -> None:
        original(*arguments)
        raise StorageFault(ResourceError("the answer was lost"))

    monkeypatch.setattr(Documents, fails, lose)
    with pytest.raises(ResourceError, match="the answer was lost"):
        place.user().submit(str(place.folder / "mine"), place.metadata())
    monkeypatch.undo()
    assert not place.documents.requests()


def test_bucket_that_does_not_answer_for_a_while_withdraws_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = current(place)
    ages: list[Callable[..., Any]] = [Documents.head_age] * 2

    def fail(documents: Documents) -> Any:
        if len(ages) > 1:
            ages.pop()
            raise StorageFault(ResourceError("S3 does not answer"))
        looks(head, 2)
        return ages[0](documents)

    monkeypatch.setattr(Documents, "head_age", fail)
    assert place.user().submit(str(place.folder / "mine"), place.metadata()) == "mine"
    assert "(S3 does not answer)" in place.said[0]


class Memory:
    """A store of secrets."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def delete(self, names: list[str]) -> None:
        self.deleted += names


def test_withdrawn_request_takes_its_secrets_along(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ACCEPT_SECONDS", 0.0)
    store = Memory()
    jobs = RemoteJobs(place.documents, lambda: JANE, place.said.append, lambda uri: store)  # ty: ignore[invalid-argument-type]
    stored = json.dumps([str(place.folder / "mine"), "TOKEN"])
    with pytest.raises(ResourceError):
        jobs.submit(str(place.folder / "mine"), place.metadata(**{SECRETS: stored}))
    assert store.deleted == ["TOKEN"]


def test_request_of_yesterday_is_dropped_with_its_secrets(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Memory()
    monkeypatch.setattr(desk.secrets, "store", lambda uri: store)
    head = current(place)
    request = place.request(**{SECRETS: json.dumps([str(place.folder / "mine"), "TOKEN"])})
    old = time.time() - desk.DAY - 60
    os.utime(place.documents.path(REQUESTS, JANE, f"{request}.json"), (old, old))
    work(head, lambda: not place.documents.requests())
    assert store.deleted == ["TOKEN"]
    assert not place.starts()
    assert "is older than a day" in place.documents.read_head()[1].refused[request]


def test_secrets_that_can_not_be_deleted_are_tried_again_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(uri: str) -> Store:
        asked.append(uri)
        raise TrainingError("denied")

    monkeypatch.setattr(desk.secrets, "store", refuse)
    head = place.head()
    place.request(**{SECRETS: json.dumps([str(place.folder / "mine"), "TOKEN"])})
    work(head, place.starts)
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    looks(head)
    assert len(asked) == 1
    monkeypatch.setattr(desk, "SECRETS_SECONDS", 0.0)
    looks(head, 2)
    assert len(asked) > 1


def test_follower_of_a_withdrawn_request_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    current(place)
    request = place.request()
    user = place.user()
    job = user.job(request)["submission_id"]

    def withdraw(part: bytes) -> None:
        place.documents.withdraw(JANE, request)

    with pytest.raises(TrainingError, match="the request of run mine was withdrawn"):
        user.tail(job, withdraw)


def test_follower_of_a_refused_request_has_the_reason(place: Place) -> None:
    head = current(place)
    request = place.request()

    def refuse(part: bytes) -> None:
        [found] = place.documents.requests()
        assert not isinstance(found, tuple)
        head._refuse(request, found.path, "not today")

    with pytest.raises(TrainingError, match="not today"):
        place.user().tail(request, refuse)


# Logs


def test_many_small_parts_of_a_log_are_merged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MERGED_PARTS", 3)
    head = begun(place)
    file = place.heads[-1].log_file(place.heads[-1].job("mine"))
    for number in range(6):
        with file.open("a") as log:
            log.write(f"line {number}\n")
        head._push_logs()
    log = place.listed()["mine"]["log"]
    assert log_of(place.documents, log) == file.read_bytes()
    assert len(place.documents.read_log(log, 0).splitlines()) > 3


@pytest.mark.parametrize("left", [0, 3])
def test_log_that_is_emptied_keeps_what_was_copied(place: Place, left: int) -> None:
    head = begun(place)
    file = place.heads[-1].log_file(place.heads[-1].job("mine"))
    with file.open("a") as log:
        log.write("more\n")
    head._push_logs()
    with file.open("r+b") as log:
        log.truncate(left)
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    looks(head)
    assert log_of(place.documents, place.listed()["mine"]["log"]).startswith(b"begins\nmore\n")


# Documents of others


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"jobs": []}'])
def test_broken_state_is_written_anew(place: Place, content: bytes) -> None:
    head = begun(place)
    Path(place.documents.path(HEAD)).write_bytes(content)
    head._has_changed = True
    head.work()
    assert place.listed()["mine"]["status"] == "RUNNING"


def test_state_of_another_version_ends_the_desk(place: Place) -> None:
    head = begun(place)
    Path(place.documents.path(HEAD)).write_text('{"format": 2}')
    head._has_changed = True
    head.work()
    assert not head.is_current
    assert json.loads(Path(place.documents.path(HEAD)).read_text()) == {"format": 2}


BROKEN: tuple[Any, ...] = ({}, [], None, {"submission_id": "x"}, {"metadata": {"run_name": 1}})


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("where", ["jobs", "refused", "ray", "code", "head"])
def test_broken_parts_of_a_state_are_left_out(place: Place, where: str, broken: Any) -> None:
    begun(place)
    path = Path(place.documents.path(HEAD))
    document = json.loads(path.read_text())
    job = document["jobs"][0]
    changed = [job, broken, {**job, "log": None}, {**job, "metadata": {"x": 1}}] if where == "jobs" else broken
    path.write_text(json.dumps({**document, where: changed}))
    assert [job["submission_id"] for job in place.user().list_jobs()] == ["mine"]
    current(place)
    assert "mine" in place.listed()


@pytest.mark.parametrize("user", ["AIDA/z:joe", "AIDA/.."])
def test_request_at_another_place_than_a_users_is_refused(place: Place, user: str) -> None:
    head = current(place)
    path = Path(place.documents.path(REQUESTS, user.replace("..", "x"), "r.json"))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": 1, "kind": RUN, "uri": "x", "metadata": place.metadata()}))
    place.documents.ring()
    work(head, lambda: not place.documents.requests())
    assert not place.starts()


def test_huge_request_is_not_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    place.request(more="x" * 2**18)
    read: list[str] = []
    original = type(place.documents.store).read
    monkeypatch.setattr(
        type(place.documents.store),
        "read",
        lambda store, path, *more: read.append(path) or original(store, path, *more),
    )
    work(head, lambda: not place.documents.requests())
    assert not [path for path in read if REQUESTS in path]
    assert not place.starts()


def test_jobs_of_a_head_that_is_away_for_a_day_have_ended(place: Place) -> None:
    begun(place)
    old = time.time() - remote.DAY - 60
    os.utime(place.documents.path(HEAD), (old, old))
    [job] = place.user().list_jobs()
    assert (job["status"], job["message"], job["is_settled"]) == ("FAILED", "its head was lost", True)
