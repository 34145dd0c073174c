"""`ray-on-ecs` on a stack: its requests, the head's desk that answers them, and heads that come and go."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.cli import follow, stop
from ray_on_ecs.cli.follow import Follower
from ray_on_ecs.contract import SECRETS_KEY_VARIABLE
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.jobs import machine, remote
from ray_on_ecs.jobs.documents import HeadState
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED, Job
from ray_on_ecs.node import desk
from ray_on_ecs.node.desk import Desk
from tests.ray_on_ecs.cli.account import Laptop
from tests.ray_on_ecs.cli.folders import job
from tests.waiting import until

# In the place of a run's driver: prints, and ends as a file of this name says.
DRIVER = """
import os, pathlib, signal, sys, time
end = pathlib.Path(os.environ["ENDS"], sys.argv[1].rpartition("/")[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
os.write(1, "begins \\N{EURO SIGN}".encode()[:-1])
while not (end.exists() and end.read_text()):
    time.sleep(0.02)
os.write(1, "\\N{EURO SIGN}".encode()[-1:] + b"\\nends\\n")
sys.exit(int(end.read_text()))
"""
RUN = ("run", "--run-name", "mine", "train.py")


class Heads:
    """The heads of a stack, one after the other, each with an empty disk."""

    def __init__(self, laptop: Laptop, folder: Path) -> None:
        self.laptop, self.folder = laptop, folder
        self.documents = laptop.documents
        self.jobs: list[MachineJobs] = []
        self._desk: tuple[Desk, threading.Thread] | None = None

    def start(self) -> None:
        """Start the next head."""
        self.jobs.append(MachineJobs(self.folder / f"head-{len(self.jobs)}", is_head=True))
        desk = Desk(self.documents, self.jobs[-1], lambda: {"ray_version": "2.60.0"})
        thread = threading.Thread(target=desk.run)
        thread.start()
        self._desk = desk, thread

    def lose(self) -> None:
        """End the head and all its processes, as the loss of its instance does."""
        if self._desk:
            desk, thread = self._desk
            desk._stopping.set()
            thread.join()
        for each in self.jobs[-1].list_jobs() if self.jobs else ():
            if each["status"] not in ENDED:
                self.jobs[-1].kill_job(each["submission_id"])
        self._desk = None

    def end(self, name: str = "mine", status: int = 0) -> None:
        """Let a run end."""
        (self.folder / name).write_text(str(status))

    @property
    def listed(self) -> dict[str, Job]:
        return {job["submission_id"]: job for job in self.documents.read_head()[1].jobs}

    def log(self, job_id: str = "mine") -> str:
        found = self.listed.get(job_id)
        return self.documents.read_log(found["log"], 0).decode(errors="replace") if found and found["log"] else ""


@pytest.fixture
def laptop(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    """A laptop with a script, on a stack whose head has not started yet."""
    for module in (desk, remote, stop):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.05)
    monkeypatch.setattr(follow, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(desk.logger, "disabled", True)  # in a cluster it has its own screen
    (stack.folder / "code").mkdir()
    (stack.folder / "code" / "train.py").touch()
    monkeypatch.setattr(machine, "DRIVER", ("-c", DRIVER))
    outputs = stack.folder / "dev.json"
    outputs.write_text(json.dumps(stack.outputs))
    code = str(stack.folder / "code")
    stack.variables |= {"ENDS": str(stack.folder), "RAY_ON_ECS_WORKING_DIR": code, "RAY_ON_ECS_OUTPUTS": str(outputs)}
    monkeypatch.setenv("ENDS", str(stack.folder))
    stack.undo.callback(stack.empty_bucket)
    return stack


@pytest.fixture
def heads(laptop: Laptop) -> Iterator[Heads]:
    heads = Heads(laptop, laptop.folder)
    yield heads
    heads.lose()


def run(laptop: Laptop, *words: str, **variables: str) -> tuple[int, str, str]:
    """Run a command; return its exit status and what it printed."""
    done = laptop.run_alone(*words, **variables)
    return done.returncode, done.stdout, done.stderr


def test_detached_run_is_accepted_by_the_head(laptop: Laptop, heads: Heads) -> None:
    heads.start()
    status, out, err = run(laptop, "run", "--detach", "--then-stop", *RUN[1:])
    assert (status, out) == (0, "run mine is submitted as job mine\n"), err
    job = heads.listed["mine"]
    assert job["metadata"]["then_stop"] == "true", "the head stops its workers, and needs no laptop"
    assert job["metadata"]["storage_path"] == f"s3://{laptop.outputs['bucket']}/runs"
    assert job["uri"] == f"s3://{laptop.outputs['bucket']}/runs/mine"
    until(lambda: not heads.documents.requests())
    again = run(laptop, "run", "--detach", *RUN[1:])
    assert again[:2] == (
        0,
        "run mine is already active as job mine, with the flags of its first command: nothing is submitted\n",
    )


def start_after(heads: Heads, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Start a head once a command has called a method of its jobs for the first time."""
    original = getattr(remote.RemoteJobs, method)

    def call(*arguments: Any) -> None:
        original(*arguments)
        if not heads.jobs:
            heads.start()

    monkeypatch.setattr(remote.RemoteJobs, method, call)


def test_run_waits_for_a_head_that_starts(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    start_after(heads, monkeypatch, "_say_once")
    status, out, err = run(laptop, "run", "--detach", *RUN[1:])
    assert (status, out) == (0, "run mine is submitted as job mine\n"), err
    [line] = [line for line in err.splitlines() if "waiting" in line]
    assert "starts the run as soon as it is up (the head has not written its state yet" in line


def test_refusal_of_the_head_is_one_line(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    heads.start()
    until(lambda: heads.documents.head_age()[0])
    monkeypatch.setattr(Desk, "_accept", lambda desk, request: desk._refuse(request.id, request.path, "not today"))
    status, out, err = run(laptop, "run", "--detach", *RUN[1:])
    assert (status, out, err.splitlines()[-1]) == (2, "", "ray-on-ecs: not today")
    assert not heads.documents.requests()


def test_driver_that_can_not_start_is_a_refusal(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also though the head has recorded the job before the start."""

    def fail(*_: object) -> None:
        until(lambda: "mine" in heads.listed, 60)
        time.sleep(0.5)
        raise ResourceError("the driver can't be started")

    heads.start()
    until(lambda: heads.documents.head_age()[0])
    monkeypatch.setattr(MachineJobs, "submit", fail)
    status, out, err = run(laptop, "run", "--detach", *RUN[1:])
    assert (status, out, err.splitlines()[-1]) == (2, "", "ray-on-ecs: the driver can't be started")
    until(lambda: not heads.listed)


@pytest.mark.parametrize("is_up", [False, True], ids=["before the first state", "before the acceptance"])
def test_ctrl_c_before_the_acceptance_withdraws_the_request(
    laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    laptop.head.is_up = is_up
    laptop.put_state()

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    status, out, err = run(laptop, *RUN)
    assert (status, out, err.splitlines()[-1]) == (130, "", "ray-on-ecs: interrupted")
    assert not heads.documents.requests()


def test_ctrl_c_after_the_acceptance_names_the_job(
    laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads.start()
    until(lambda: heads.documents.head_age()[0])
    wait = remote.RemoteJobs._wait

    def interrupt(jobs: remote.RemoteJobs, found: Callable[..., str], **patience: bool) -> str:
        wait(jobs, found)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.RemoteJobs, "submitting", lambda jobs: nullcontext())
    monkeypatch.setattr(remote.RemoteJobs, "_wait", interrupt)
    status, _, err = run(laptop, *RUN)
    assert status == 130
    assert err.split("\n")[-4:-1] == ["run mine is submitted as job mine, and goes on", "", "ray-on-ecs: interrupted"]


@pytest.mark.parametrize("refused", ["DELETE", "GET"])
def test_request_that_can_not_be_withdrawn_is_named(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    laptop.put_state()

    def interrupt(jobs: remote.RemoteJobs, found: Callable[..., str], **patience: bool) -> str:
        laptop.head.jobs = ["RUNNING"]  # since the command has read the state
        laptop.put_state()
        laptop.refuse(f"{refused} /{{bucket}}/clusters")
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.RemoteJobs, "submitting", lambda jobs: threading.Lock())
    monkeypatch.setattr(remote.RemoteJobs, "_wait", interrupt)
    status, _, err = run(laptop, *RUN)
    *_, line, _, last = err.splitlines()
    assert (status, last) == (130, "ray-on-ecs: interrupted")
    assert line.startswith("the head may still start the run, as its request can't be withdrawn (")


def test_followed_run_has_the_status_of_its_driver(laptop: Laptop, heads: Heads) -> None:
    heads.start()
    heads.end(status=1)
    status, out, err = run(laptop, *RUN)
    assert status == 1, err
    assert out == "run mine is submitted as job mine\nbegins \N{EURO SIGN}\nends\n"
    status, out, err = run(laptop, "logs", "mine")
    assert (status, out, err) == (0, "begins \N{EURO SIGN}\nends\n", "")


def scenario(act: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Start a thread that acts while a command runs, and a list with its error."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread, errors


def called(monkeypatch: pytest.MonkeyPatch, method: str) -> threading.Event:
    """Return an event that is set once a command that follows a log has called this method with something new."""
    original, event = getattr(Follower, method), threading.Event()

    def call(follower: Follower, new: Any) -> None:
        original(follower, new)
        if new:
            event.set()

    monkeypatch.setattr(Follower, method, call)
    return event


def test_log_goes_on_over_a_new_head(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    heads.start()
    assert run(laptop, "run", "--detach", *RUN[1:])[0] == 0

    shows, waits = called(monkeypatch, "_show"), called(monkeypatch, "_wait")

    def replace() -> None:
        assert shows.wait(60)
        heads.lose()
        laptop._age(heads.documents.path("head.json").partition("/")[2], 300)
        assert waits.wait(60), "the command sees that the head is silent"
        heads.start()
        until(lambda: heads.log("mine.2"), 60, between=0.05)
        heads.end()

    thread, errors = scenario(replace)
    status, out, err = run(laptop, "logs", "--follow", "mine")
    thread.join()
    assert not errors
    assert status == 0, err
    lost = "job mine lost its driver; the head has submitted run mine again as job mine.2\n"
    assert out.endswith(f"{lost}begins \N{EURO SIGN}\nends\n"), out
    assert out.count("begins") == 2
    assert "waiting for the log (the head wrote its state 0:0" in err
    assert err.count("the head is silent") <= 1


def test_driver_that_is_killed_is_followed_to_its_successor(laptop: Laptop, heads: Heads) -> None:
    heads.start()

    def kill() -> None:
        until(lambda: heads.log("mine"), 60, between=0.05)
        folder, _ = heads.jobs[0]._find("mine")
        os.kill(machine._document(folder / machine.PROCESSES)["driver"][0], signal.SIGKILL)
        heads.end()

    thread, errors = scenario(kill)
    status, out, err = run(laptop, *RUN)
    thread.join()
    assert not errors
    assert status == 0, err
    lost = "begins \njob mine lost its driver; the head has submitted run mine again as job mine.2\n"
    assert out.endswith(f"{lost}begins \N{EURO SIGN}\nends\n"), out


def test_log_of_a_run_is_followed_from_its_first_job(laptop: Laptop, heads: Heads) -> None:
    heads.start()
    assert run(laptop, "run", "--detach", *RUN[1:])[0] == 0
    until(lambda: heads.log("mine"))
    heads.lose()
    heads.start()
    until(lambda: heads.log("mine.2"))
    heads.end()
    status, out, err = run(laptop, "logs", "--follow", "mine")
    assert status == 0, err
    assert out.count("begins") == 2
    assert out.endswith("begins \N{EURO SIGN}\nends\n")


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"status": "STOPPED"}, "interrupted"),
        ({"status": "FAILED", "is_settled": True}, "lost"),
        ({"status": "FAILED", "driver_exit_code": 1}, "lost"),
        ({"status": "RUNNING"}, "training"),
        ({"status": "STOPPED", "submission_id": "mine.2"}, "training"),
        ({"status": "STOPPED", "metadata": {"run_name": "mine", "storage_path": "s3://other/runs"}}, "training"),
    ],
)
def test_run_whose_job_has_ended_is_not_shown_as_under_way(
    laptop: Laptop, heads: Heads, changed: dict[str, Any], state: str
) -> None:
    """Its head was lost a moment ago, and its status says that it trains."""
    bucket = laptop.outputs["bucket"]
    metadata = {"run_name": "mine", "storage_path": f"s3://{bucket}/runs"}
    heads.documents.write_head(HeadState(jobs=[{**job("mine", metadata=metadata), **changed}]), None)
    laptop.put_run("mine", "training", job="mine")
    [listed] = [row for row in json.loads(run(laptop, "runs", "--json")[1]) if row["name"] == "mine"]
    assert listed["state"] == state
    status, _, err = run(laptop, "rm", "mine")
    assert (status, "under way" in err) == ((2, True) if state == "training" else (0, False)), err


@pytest.mark.parametrize("words", [("mine",), ("--all",)], ids=["one", "all"])
def test_run_is_stopped_with_its_secrets(laptop: Laptop, heads: Heads, words: tuple[str, ...]) -> None:
    heads.start()
    assert run(laptop, "run", "--detach", "--secret", "TOKEN", *RUN[1:], TOKEN="hf_12345")[0] == 0
    names = [parameter["Name"] for parameter in laptop.aws("ssm").describe_parameters()["Parameters"]]
    assert any("TOKEN" in name for name in names)
    status, _, err = run(laptop, "stop", *words)
    assert status == 0, err
    assert words == ("mine",) or err.startswith("stopping run mine of ")  # IAM's identity
    assert heads.listed["mine"]["status"] == "STOPPED"
    names = [parameter["Name"] for parameter in laptop.aws("ssm").describe_parameters()["Parameters"]]
    assert not any("TOKEN" in name for name in names)
    assert run(laptop, "stop", "mine")[0] == 2


def test_secrets_have_the_key_of_the_stack(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1a2b"
    monkeypatch.setenv(SECRETS_KEY_VARIABLE, key)
    heads.start()
    monkeypatch.delenv(SECRETS_KEY_VARIABLE)
    assert run(laptop, "run", "--detach", "--secret", "TOKEN", *RUN[1:], TOKEN="hf_12345")[0] == 0
    [stored] = [
        parameter for parameter in laptop.aws("ssm").describe_parameters()["Parameters"] if "TOKEN" in parameter["Name"]
    ]
    assert stored["KeyId"] == key
    assert run(laptop, "stop", "mine")[0] == 0


def test_request_is_listed_and_stopped_before_its_acceptance(
    laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop.put_state()
    metadata = {"run_name": "mine", "storage_path": f"s3://{laptop.outputs['bucket']}/runs"}
    request = heads.documents.write_request("AROA:jane", "run", uri=f"{metadata['storage_path']}/m", metadata=metadata)
    out = run(laptop, "runs")[1]
    assert "mine" in out
    assert "starting" in out
    assert "jobs     0 running, 1 queued" in run(laptop, "status")[1]
    start_after(heads, monkeypatch, "stop_job")
    status, _, err = run(laptop, "stop", "mine")
    assert status == 0, err
    assert [job["metadata"]["request"] for job in heads.listed.values()] == [request]
    assert heads.listed["mine"]["status"] == "STOPPED"


@pytest.mark.parametrize("words", [("runs",), ("stop", "run-0"), ("logs", "run-0"), ("rm", "first")])
def test_age_of_a_silent_state_is_said_once(
    laptop: Laptop, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.RemoteJobs, "stop_seconds", 0.0)
    laptop.head.jobs, laptop.head.silent_seconds = ["RUNNING"], 240
    laptop.put_run("first")
    laptop.put_state()
    err = run(laptop, *words)[2]
    assert err.count("the head is silent: this is its state of 0:04:0") == 1, err
    laptop.head.silent_seconds = 0
    laptop.put_state()
    assert "is silent" not in run(laptop, *words)[2]


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({}, True),
        ({"is_settled": True}, False),
        ({"status": "STOPPED"}, False),
        ({"status": "SUCCEEDED"}, False),
        ({"driver_exit_code": 1}, False),
        ({"driver_exit_code": -9}, True),
        ({"is_interrupted": True, "driver_exit_code": 130}, True),
        ({"metadata": {"max_resubmissions": "0"}}, False),
        ({"metadata": {"max_resubmissions": "3", "resubmissions": "3"}}, False),
        ({"metadata": {"max_resubmissions": "3", "resubmissions": "2"}}, True),
    ],
)
def test_run_that_is_about_to_be_submitted_again_is_under_way(
    laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], goes_on: bool
) -> None:
    """The head reads the stop before it submits the run again."""
    metadata = {"run_name": "mine", "storage_path": f"s3://{laptop.outputs['bucket']}/runs"}
    metadata |= {"max_resubmissions": "3", **changed.pop("metadata", {})}
    heads.documents.write_head(HeadState(jobs=[{**job("mine", "FAILED", metadata=metadata), **changed}]), None)
    laptop.put_run("mine", "lost")
    assert ("stop mine ends it" in run(laptop, "rm", "mine")[2]) == goes_on
    if goes_on:
        start_after(heads, monkeypatch, "stop_job")
        assert run(laptop, "stop", "mine")[0] == 0
        assert heads.listed["mine"]["status"] == "STOPPED"
        assert heads.listed.keys() == {"mine"}
    else:
        assert run(laptop, "stop", "mine")[0] == 2


@pytest.mark.parametrize("words", [("run-0",), ("--all",)], ids=["one", "all"])
def test_stop_on_a_silent_head_says_that_it_waits(
    laptop: Laptop, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.RemoteJobs, "stop_seconds", 0.0)
    laptop.head.jobs, laptop.head.silent_seconds = ["RUNNING"], 240
    laptop.put_state()
    status, _, err = run(laptop, "stop", *words)
    what = "1 run" if words == ("--all",) else "run run-0"
    assert f"waiting for the head, which stops {what} as soon as it is up\n" in err
    assert err.endswith("job run-0 has not ended in 0 s; the head stops it once it is up\n")
    assert status == 3


def test_interrupted_stop_says_that_it_goes_on(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.head.jobs = ["RUNNING"]
    laptop.put_state()

    def interrupt(jobs: remote.RemoteJobs) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.RemoteJobs, "is_away", interrupt)
    status, _, err = run(laptop, "stop", "run-0")
    assert status == 130
    assert err.splitlines()[-3::2] == [
        "the head stops run run-0 as soon as it reads the request",
        "ray-on-ecs: interrupted",
    ]
    [request] = heads.documents.requests()
    assert not isinstance(request, tuple)
    assert request.content["jobs"] == ["run-0"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("s3://{bucket}/clusters/typo", "cluster typo is not in s3://{bucket}; give s3://{bucket}/clusters/"),
        ("s3://{bucket}", "s3://{bucket} has 2 clusters; give s3://{bucket}/clusters/"),
    ],
)
@pytest.mark.parametrize("words", [("stop", "x"), ("run", "--detach", *RUN[1:])])
def test_cluster_that_the_bucket_has_not_is_one_line(
    laptop: Laptop, words: tuple[str, ...], address: str, reason: str
) -> None:
    laptop.put_state()
    documents = replace(laptop.documents, root=f"{laptop.outputs['bucket']}/clusters/other")
    documents.write_head(HeadState(), None)
    names = {"bucket": laptop.outputs["bucket"]}
    laptop.variables |= {"RAY_ON_ECS_CLUSTER": address.format(**names), "RAY_ON_ECS_OUTPUTS": ""}
    status, _, err = run(laptop, *words)
    assert status == 2
    assert f"RAY_ON_ECS_CLUSTER: {reason.format(**names)}" in err.splitlines()[-1]


def test_runs_of_a_bucket_whose_cluster_is_gone_are_listed(laptop: Laptop) -> None:
    laptop.put_run("first")
    laptop.variables |= {"RAY_ON_ECS_CLUSTER": f"s3://{laptop.outputs['bucket']}", "RAY_ON_ECS_OUTPUTS": ""}
    status, out, err = run(laptop, "runs")
    assert status == 0, err
    assert "first" in out
    assert "has 0 clusters; pulumi up creates a cluster" in err


COMMANDS = (("runs",), ("status",), ("logs", "x"), ("stop", "x"), ("rm", "x"), ("run", "--detach", *RUN[1:]))


@pytest.mark.parametrize("words", COMMANDS)
def test_state_of_another_version_is_one_line(laptop: Laptop, words: tuple[str, ...]) -> None:
    laptop.put_state()
    laptop.put_run("x")
    path = laptop.documents.path("head.json")
    with laptop.documents.store.writing(path) as file:
        file.write(b'{"format": 2}')
    status, out, err = run(laptop, *words)
    assert "Traceback" not in err
    assert "its format is 2, and this version's is 1): pulumi up gives the head the image of this version" in err
    assert status == (0 if words[0] in ("runs", "rm") else 2), out + err


@pytest.mark.parametrize("words", COMMANDS)
def test_missing_bucket_is_one_line(laptop: Laptop, words: tuple[str, ...]) -> None:
    laptop.delete_bucket()
    status, out, err = run(laptop, *words)
    assert status in (1, 2, 3), out + err
    assert len(err.splitlines()) == 1, err
