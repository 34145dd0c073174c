"""The head's desk and its users: real drivers, a folder or an S3 that loses answers, heads that die at any point."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.retries.standard import ExponentialBackoff

from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs import machine, record, remote
from ray_on_ecs.jobs.documents import REQUESTS, RUN, STACKS, STOP, Documents, Request
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED, PENDING, REQUEST, STACKS_REQUEST, Job
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.node import desk
from ray_on_ecs.node.desk import Desk
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.disk import Disk
from tests.aws import BUCKET, environment
from tests.flaky_s3 import flaky_proxy
from tests.waiting import until

# In the place of a run's driver: notes its start in the run's folder, prints, and ends as a file there says.
DRIVER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
print("begins", flush=True)
end = folder / "end"
while not (end.exists() and end.read_text()):
    time.sleep(0.02)
print("ends", flush=True)
sys.exit(int(end.read_text()))
"""
JANE = "AROAEXAMPLE:jane@example.com"


class Place:
    """A cluster: its documents, its heads one after the other, and the runs of its users."""

    def __init__(self, documents: Documents, folder: Path) -> None:
        self.documents, self.folder = documents, folder
        self.heads: list[MachineJobs] = []
        self.said: list[str] = []

    def head(self, *, with_state: bool = False) -> Desk:
        """A head with an empty disk, or with the state of the one before."""
        if not (with_state and self.heads):
            self.heads.append(MachineJobs(self.folder / f"head-{len(self.heads)}", is_head=True))
        return Desk(self.documents, self.heads[-1], lambda: {"ray_version": "2.60.0"})

    def user(self, user: str = JANE) -> RemoteJobs:
        return RemoteJobs(self.documents, lambda: user, self.said.append)

    def metadata(self, name: str = "mine", **more: str) -> dict[str, str]:
        return {"run_name": name, "storage_path": str(self.folder), "max_resubmissions": "3", **more}

    def request(self, name: str = "mine", user: str = JANE, **more: str) -> str:
        uri = str(self.folder / name)
        return self.documents.write_request(user, RUN, uri=uri, metadata=self.metadata(name, **more))

    def starts(self, name: str = "mine") -> list[int]:
        file = self.folder / name / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def end(self, name: str = "mine", status: int = 0) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "end").write_text(str(status))

    def listed(self) -> dict[str, Job]:
        return {job["submission_id"]: job for job in self.documents.read_head()[1].jobs}

    def lose_head(self) -> None:
        """End all processes of the last head, as the loss of its instance does."""
        for job in self.heads[-1].list_jobs():
            if job["status"] not in ENDED:
                self.heads[-1].kill_job(job["submission_id"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER))
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.02)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place = Place(Documents(Disk(), str(tmp_path / "bucket" / "clusters" / "c")), tmp_path / "runs")
    yield place
    for jobs in place.heads:
        for job in jobs.list_jobs():
            if job["status"] not in ENDED:
                jobs.kill_job(job["submission_id"])


def work(head: Desk, until_true: Callable[[], Any]) -> None:
    """Let a head work until a condition holds."""

    def holds() -> Any:
        head.work()
        return until_true()

    until(holds, between=0.02)


def current(place: Place) -> Desk:
    """A new head that has taken over."""
    head = place.head()
    work(head, lambda: head.is_current)
    return head


def begun(place: Place, name: str = "mine") -> Desk:
    """A new head on which a run has begun."""
    head = place.head()
    place.request(name)
    work(head, lambda: place.starts(name))
    return head


def test_requested_run_is_started_and_recorded(place: Place) -> None:
    head = place.head()
    request = place.request(submitted="1.0", owner="joe")
    work(head, place.starts)
    job = place.listed()["mine"]
    assert (job["metadata"]["owner"], job["metadata"][REQUEST]) == ("jane@example.com", request)
    assert float(job["metadata"]["submitted"]) == pytest.approx(time.time(), abs=60), "the storage's clock orders runs"
    assert not place.documents.requests()
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    assert len(place.starts()) == 1


@pytest.mark.parametrize(
    ("user", "label", "owner"),
    [(JANE, "joe", "jane@example.com"), ("AIDAEXAMPLE", "joe", "joe"), ("AIDAEXAMPLE", "", "AIDAEXAMPLE")],
)
def test_owner_is_the_identity_of_the_request(place: Place, user: str, label: str, owner: str) -> None:
    head = place.head()
    place.request(user=user, owner=label)
    work(head, place.starts)
    assert place.listed()["mine"]["metadata"]["owner"] == owner


def test_lost_bell_and_repeated_bells_start_a_run_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    monkeypatch.setattr(desk, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(Documents, "ring", lambda documents: None)
    place.request()
    work(head, place.starts)
    monkeypatch.undo()
    for _ in range(3):
        place.documents.ring()
        head.work()
    assert len(place.starts()) == 1


def test_second_request_for_a_run_under_way_is_refused(place: Place) -> None:
    head = begun(place)
    second = place.request()
    work(head, lambda: not place.documents.requests())
    assert place.documents.read_head()[1].refused[second] == "run mine is already active as job mine"
    assert len(place.starts()) == 1


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "kind": "run"}',
        b'{"format": 1, "kind": "other", "jobs": []}',
        b'{"format": 1, "kind": "stop", "jobs": [1]}',
        b'{"format": 1, "kind": "run", "uri": 1, "metadata": {"run_name": "a", "storage_path": "b"}}',
        b'{"format": 1, "kind": "run", "uri": "x", "metadata": {"run_name": "../a", "storage_path": "b"}}',
        b'{"format": 1, "kind": "run", "uri": "x", "metadata": {"run_name": "a", "storage_path": "b", "n": 1}}',
        b'{"format": 2, "kind": "run"}',
    ],
)
def test_broken_request_is_refused_and_holds_up_no_other(place: Place, document: bytes) -> None:
    head = place.head()
    path = Path(place.documents.path(REQUESTS, "AIDAOTHER", "broken.json"))
    path.parent.mkdir(parents=True)
    path.write_bytes(document)
    place.request()
    work(head, place.starts)
    refused = place.documents.read_head()[1].refused["broken"]
    assert refused.startswith("the head refuses the request (")
    assert ("different versions: pulumi up" in refused) == (b'"format": 2' in document)
    assert not place.documents.requests()


def test_withdrawn_request_is_not_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    request = place.request()
    place.documents.withdraw(JANE, request)
    head.work()
    assert not place.starts()
    later = place.request("other")
    write = Documents.write_head

    def withdraw_before(documents: Documents, *arguments: Any) -> Any:
        place.documents.withdraw(JANE, later)  # after the head has read it
        return write(documents, *arguments)

    monkeypatch.setattr(Documents, "write_head", withdraw_before)
    head.work()
    monkeypatch.undo()
    work(head, lambda: "other" not in place.listed())
    assert not place.starts("other")


def test_interrupted_submission_is_withdrawn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.head().work()
    monkeypatch.setattr(remote, "ACCEPT_SECONDS", 0.1)
    with pytest.raises(ResourceError, match="did not answer"):
        place.user().submit(str(place.folder / "mine"), place.metadata())
    assert not place.documents.requests()


def test_wait_for_a_silent_head_says_so_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ACCEPT_SECONDS", 0.3)
    with pytest.raises(ResourceError):
        place.user().submit(str(place.folder / "mine"), place.metadata())
    line, withdrawn = place.said
    assert "the head has not written its state yet" in line
    assert withdrawn == "the request of run mine is withdrawn"


def test_stopped_run_ends_and_stays_stopped(place: Place) -> None:
    head = begun(place)
    place.user().stop_job("mine")
    work(head, lambda: place.listed()["mine"]["status"] == "STOPPED")
    place.lose_head()
    later = place.head()
    for _ in range(3):
        later.work()
    assert len(place.starts()) == 1
    assert place.listed().keys() == {"mine"}


@pytest.mark.parametrize("user", [JANE, "AROAEXAMPLE:joe"])
def test_stop_of_a_request_that_is_not_accepted_yet(place: Place, user: str) -> None:
    """A user withdraws an own request at once; the head reads the stop of another one."""
    place.head().work()
    request = place.request()
    [pending] = place.user().list_jobs()
    assert (pending["status"], pending["metadata"]["run_name"]) == (PENDING, "mine")
    place.user(user).stop_job(pending["submission_id"])
    left = [request.kind for request in place.documents.requests() if not isinstance(request, tuple)]
    assert left == ([] if user == JANE else [RUN, STOP])
    head = place.head()
    work(head, lambda: head.is_current and not place.documents.requests())
    work(head, lambda: all(job["status"] == "STOPPED" for job in place.listed().values()))
    assert [job["metadata"][REQUEST] for job in place.listed().values()] == ([] if user == JANE else [request])


def test_stop_of_a_request_that_the_head_accepts_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    request = place.request()
    withdraw = Documents.withdraw

    def accept_before(documents: Documents, *arguments: Any) -> None:
        work(head, place.starts)
        withdraw(documents, *arguments)

    monkeypatch.setattr(Documents, "withdraw", accept_before)
    place.user().stop_job(request)
    monkeypatch.undo()
    work(head, lambda: place.listed()["mine"]["status"] == "STOPPED")


def test_command_whose_request_another_one_withdraws_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    current(place)
    uri, errors = str(place.folder / "mine"), list[BaseException]()

    def submit() -> None:
        try:
            place.user().submit(uri, place.metadata())
        except TrainingError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    [pending] = until(place.user().list_jobs, between=0.02)
    place.user().stop_job(pending["submission_id"])
    thread.join(60)
    assert isinstance(errors[0], Interrupted), errors
    assert not place.starts()


def test_driver_that_does_not_stop_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER.replace("lambda *_: sys.exit(130)", "signal.SIG_IGN")))
    monkeypatch.setattr(desk, "STOP_SECONDS", 0.1)
    head = begun(place)
    place.user().stop_job("mine")
    work(head, lambda: place.listed()["mine"]["status"] == "STOPPED")
    assert place.listed()["mine"]["driver_exit_code"] == -signal.SIGKILL
    assert len(place.starts()) == 1


def test_killed_driver_is_started_again_up_to_a_limit(place: Place) -> None:
    head = place.head()
    place.request(max_resubmissions="2")
    for count in (1, 2, 3):
        work(head, lambda count=count: len(place.starts()) == count)
        os.kill(place.starts()[-1], signal.SIGKILL)
    work(head, lambda: place.listed()["mine.3"]["status"] == "FAILED")
    head.work()
    assert place.listed().keys() == {"mine", "mine.2", "mine.3"}


@pytest.mark.parametrize("status", [0, 1, 2, 3, 130])
def test_driver_that_ends_by_itself_is_not_started_again(place: Place, status: int) -> None:
    head = place.head()
    place.end(status=status)
    place.request()
    work(head, lambda: place.listed().get("mine", {}).get("status") in ENDED)
    head.work()
    assert place.listed().keys() == {"mine"}
    assert place.listed()["mine"]["driver_exit_code"] == status


@pytest.mark.parametrize("with_state", [False, True])
def test_next_head_continues_what_was_under_way(place: Place, with_state: bool) -> None:
    head = place.head()
    place.end("ended")
    for name in ("ended", "mine"):
        place.request(name)
        work(head, lambda name=name: place.starts(name))
    work(head, lambda: place.listed()["ended"]["status"] in ENDED)
    for lost in (1, 2):  # the volume may be empty twice
        place.lose_head()
        head = place.head(with_state=with_state)
        work(head, lambda lost=lost: len(place.starts()) == lost + 1)
    place.end()
    work(head, lambda: place.listed()["mine.3"]["status"] == "SUCCEEDED")
    assert len(place.starts("ended")) == 1
    assert [job["status"] for job in place.listed().values()] == ["SUCCEEDED", "FAILED", "FAILED", "SUCCEEDED"]


def test_next_head_continues_the_runs_in_the_order_of_their_requests(place: Place) -> None:
    """They start at once, and the first of them that is in the queue begins."""
    first = place.head()
    for name in "cab":
        place.request(name)
        work(first, lambda name=name: place.starts(name))
    jobs = place.heads[-1]
    jobs.kill_job("c")  # so that its last job is the youngest
    work(first, lambda: len(place.starts("c")) == 2)
    place.lose_head()
    second = place.head()
    work(second, lambda: all(place.starts(name)[1:] for name in "cab"))
    again = [job["metadata"]["run_name"] for job in place.heads[-1].list_jobs()]
    assert again == ["c", "a", "b"]


def test_stopped_head_ends_its_jobs_and_the_next_one_continues_them(place: Place) -> None:
    head = begun(place)
    head.stop_jobs()
    assert place.listed()["mine"]["driver_exit_code"] == 130
    later = place.head()
    work(later, lambda: len(place.starts()) == 2)
    assert place.listed()["mine.2"]["metadata"]["resubmissions"] == "1"


def test_runs_of_a_head_that_is_away_for_a_day_are_not_continued(place: Place) -> None:
    begun(place)
    place.lose_head()
    old = time.time() - desk.DAY - 60
    os.utime(place.documents.path("head.json"), (old, old))
    later = place.head()
    work(later, lambda: place.listed()["mine"]["status"] == "FAILED")
    later.work()
    assert len(place.starts()) == 1


@pytest.mark.parametrize("point", ["write_head", "submit", "delete"])
def test_head_that_dies_while_it_accepts_a_request_starts_it_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Between the claim and the start, and between the start and the deletion of the request."""
    head = current(place)
    place.request()
    owner: Any = {"write_head": Documents, "submit": MachineJobs, "delete": Disk}[point]
    original = getattr(owner, point)

    def die_after(*arguments: Any, **options: Any) -> Any:
        if point != "submit":
            original(*arguments, **options)
        raise SystemExit

    monkeypatch.setattr(owner, point, die_after)
    with pytest.raises(SystemExit):
        head.work()
    monkeypatch.undo()
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER))
    later = place.head(with_state=True)
    work(later, place.starts)
    work(later, lambda: not place.documents.requests())
    place.end()
    work(later, lambda: all(job["status"] in ENDED for job in place.listed().values()))
    assert len(place.starts()) == 1


def test_later_head_wins(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    first = begun(place)
    second = current(place)
    place.end("other")
    place.request("other")
    for _ in range(5):
        first.work()
        second.work()
    assert not first.is_current
    assert second.is_current
    until(lambda: place.starts("other"))
    assert len(place.starts("other")) == 1
    assert psutil.pid_exists(place.starts()[0]), "a healthy run goes on"


def test_stop_of_a_lost_run_ends_it_for_good(place: Place) -> None:
    for with_state in (True, False):
        name = f"mine-{with_state}"
        begun(place, name)
        place.lose_head()
        place.user().stop_job(name)
        later = place.head(with_state=with_state)
        work(later, lambda name=name: place.listed()[name]["status"] == "STOPPED")
        later.work()
        assert len(place.starts(name)) == 1


def test_finished_run_of_a_stopped_head_is_not_started_again(place: Place) -> None:
    head = begun(place)
    place.end()
    job = place.heads[0].job("mine")
    (place.heads[0].log_file(job).parent / machine.INTERRUPT).touch()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    later = place.head()
    for _ in range(3):
        later.work()
    assert place.listed().keys() == {"mine"}


def test_old_run_is_known_to_the_next_head_beside_many_short_ones(place: Place) -> None:
    begun(place)
    version, state = place.documents.read_head()
    later = [
        {
            **state.jobs[0],
            **{"submission_id": f"s{number}", "log": f"s{number}", "status": "SUCCEEDED"},
            "metadata": place.metadata(f"s{number}"),
            "start_time": state.jobs[0]["start_time"] + 1000,
        }
        for number in range(150)
    ]
    assert place.documents.write_head(replace(state, jobs=[*state.jobs, *later], head="before"), version)
    place.lose_head()
    next_head = place.head()
    work(next_head, lambda: len(place.starts()) == 2)
    assert len(place.listed()) == 102


def test_command_that_holds_the_lock_does_not_hold_up_the_desk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LOCK_SECONDS", 0.1)
    head = current(place)
    with MachineJobs(place.folder / "head-0", is_head=True).submitting():
        place.request()
        head.work()
        assert not place.starts()
    work(head, place.starts)


def test_request_that_is_still_there_after_its_run_starts_no_second(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = current(place)
    request = place.request()
    with monkeypatch.context() as lost:
        lost.setattr(Disk, "delete", lambda *_: None)
        work(head, place.starts)
        place.end()
        work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    [left] = place.documents.requests()
    assert isinstance(left, Request)
    assert left.id == request
    place.documents.ring()
    work(head, lambda: not place.documents.requests())
    assert len(place.starts()) == 1
    assert list(place.listed()) == ["mine"]


def test_faulty_request_holds_up_no_other(place: Place) -> None:
    head = place.head()
    request = place.documents.write_request(JANE, RUN, uri="\0", metadata=place.metadata("faulty"))
    place.request()
    work(head, place.starts)
    work(head, lambda: request in place.documents.read_head()[1].refused)


def test_parts_of_a_log_are_merged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "PART_BYTES", 10)
    head = begun(place)
    job = place.heads[0].job("mine")
    for number in range(20):
        with place.heads[0].log_file(job).open("a") as log:
            log.write(f"line {number}\n")
        head.work()
    place.end()
    work(head, lambda: place.user().job("mine")["status"] in ENDED)
    text = place.heads[0].log_file(job).read_text()
    assert place.user().log("mine") == text
    first = place.documents.read_log(job["log"], 0)
    assert len(first) >= 10
    for middle in (len(first), 7):
        parts: list[bytes] = []
        place.user().tail("mine", parts.append, middle)
        assert text.encode().startswith(text.encode()[:middle] + b"".join(parts))


def test_lost_answer_to_the_state_costs_no_head_its_cluster(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = current(place)
    write = Disk.write_if

    def lose_answer(*arguments: Any) -> None:
        write(*arguments)
        raise OSError("no answer")

    place.request()
    monkeypatch.setattr(Disk, "write_if", lose_answer)
    head.work()
    monkeypatch.setattr(Disk, "write_if", write)
    work(head, place.starts)
    assert head.is_current
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] == "SUCCEEDED")
    assert len(place.starts()) == 1


def test_log_has_each_line_once_over_heads(place: Place) -> None:
    head = begun(place)
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: place.user().tail("mine", seen.append), daemon=True)
    reader.start()
    work(head, lambda: b"".join(seen) == b"begins\n")
    head = place.head(with_state=True)  # the driver goes on, as if the thread had begun again
    place.end()
    work(head, lambda: not reader.is_alive())
    assert b"".join(seen) == b"begins\nends\n"
    assert place.user().log("mine") == "begins\nends\n"


def test_part_of_a_log_keeps_its_content_if_an_answer_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = begun(place)
    until(lambda: place.heads[0].log("mine") == "begins\n")
    write = Documents.write_log

    def lose_answer(*arguments: Any) -> None:
        write(*arguments)
        raise OSError("no answer")

    work(head, lambda: place.user().log("mine") == "begins\n")
    place.end()
    until(lambda: place.heads[0].job("mine")["status"] in ENDED)
    monkeypatch.setattr(Documents, "write_log", lose_answer)
    head.work()
    with place.heads[0].log_file(place.heads[0].job("mine")).open("a") as log:
        log.write("more\n")
    monkeypatch.setattr(Documents, "write_log", write)
    work(head, lambda: place.user().log("mine") == "begins\nends\nmore\n")


def test_logs_of_jobs_that_are_no_longer_listed_are_deleted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    head = begun(place)
    place.documents.write_log("of-a-job-long-ago", 0, b"x")
    monkeypatch.setattr(desk, "PRUNE_SECONDS", 0.0)
    work(head, lambda: place.user().log("mine") == "begins\n")
    assert place.documents.log_size("of-a-job-long-ago") == 0


def test_state_of_another_version_names_the_way_out(place: Place) -> None:
    current(place)
    path = Path(place.documents.path("head.json"))
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match="pulumi up"):
        place.user().list_jobs()


class Memory(MachineJobs):
    """Jobs without processes: 200 drivers would take a minute."""

    def __init__(self) -> None:
        self.listed: list[Job] = []

    @contextmanager
    def submitting(self, seconds: float = -1) -> Generator[None]:
        yield

    def list_jobs(self) -> list[Job]:
        return [*self.listed]

    def submit(self, uri: str, metadata: Any, job_id: str = "") -> str:
        self.listed.append({**record.pending(job_id, metadata, time.time(), uri), "log": job_id, "status": "RUNNING"})
        return job_id

    def reserve(self, ids: Collection[str]) -> None:
        pass

    def log_file(self, job: Job) -> Path:
        return Path(os.devnull)


@pytest.mark.ray  # with the tests that take long
@pytest.mark.usefixtures("s3_client")
def test_each_of_200_requests_starts_once_though_answers_are_lost(
    aws_server: str, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with flaky_proxy(aws_server, 0.0, 0.1, spared=5) as proxy:
        for name, value in environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        place.documents = Documents(Bucket(), f"{BUCKET}/clusters/many")
        names = [f"run-{number}" for number in range(200)]
        for name in names:
            place.request(name)
        jobs = Memory()
        head = Desk(place.documents, jobs, dict)
        work(head, lambda: len(jobs.listed) >= 200 and not place.documents.requests())
        assert sorted(job["submission_id"] for job in jobs.listed) == sorted(names)
        assert len(place.documents.read_head()[1].jobs) == 200
        assert proxy.lost > 50


def test_user_may_only_ask_a_head_that_has_written(place: Place) -> None:
    with pytest.raises(ResourceError, match="has not written its state yet"):
        place.user().list_jobs()


def test_request_for_stacks_reaches_the_driver(place: Place) -> None:
    head = begun(place)
    asked = threading.Thread(target=place.user().ask_stacks, args=["mine", "20261129-180000-00ff"])
    asked.start()
    work(head, lambda: not asked.is_alive())
    [job] = place.heads[-1].list_jobs()
    assert place.heads[-1].log_file(job).with_name(STACKS_REQUEST).read_text() == "20261129-180000-00ff"
    assert place.listed()["mine"]["status"] not in ENDED
    assert not place.documents.requests()


@pytest.mark.parametrize("job", ["mine", "absent"])
def test_request_for_stacks_of_a_job_that_has_ended_is_dropped(place: Place, job: str) -> None:
    head = begun(place)
    place.end()
    work(head, lambda: place.listed()["mine"]["status"] in ENDED)
    place.documents.write_request(JANE, STACKS, jobs=[job])
    work(head, lambda: not place.documents.requests())
    assert len(place.starts()) == 1


def test_refused_request_for_stacks_is_an_error(place: Place) -> None:
    head, errors = place.head(), []
    work(head, lambda: head.is_current)

    def ask() -> None:
        with pytest.raises(UsageError, match="is not a request"):
            place.user().ask_stacks(1, "20261129-180000-00ff")  # ty: ignore[invalid-argument-type]
        errors.append(True)

    asked = threading.Thread(target=ask)
    asked.start()
    work(head, lambda: not asked.is_alive())
    assert errors
    assert not place.documents.requests()
