"""Commands on a stack whose head sleeps: those that read need no head, and those that need one wake it."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from ray_on_ecs.cli import dashboard
from ray_on_ecs.cluster import wake
from ray_on_ecs.contract import HEAD_REQUESTED
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.jobs import remote
from ray_on_ecs.jobs.documents import HEAD, RUN, Documents, HeadState, Wake
from ray_on_ecs.jobs.record import SECRETS
from ray_on_ecs.node import ray_status
from ray_on_ecs.storage.bucket import StorageFault
from tests.aws import REGION
from tests.ray_on_ecs.cli.account import Laptop
from tests.ray_on_ecs.cli.folders import job, moment
from tests.ray_on_ecs.cli.test_remote_runs import RUN as TYPED
from tests.ray_on_ecs.cli.test_remote_runs import Heads, heads, laptop, run, scenario
from tests.ray_on_ecs.cli.test_status import shown
from tests.waiting import until

__all__ = ["heads", "laptop"]  # fixtures

DAY = 86400.0
# The age of the head's state in seconds, and its idle minutes; of a head that sleeps after an hour.
STATES = {
    "awake": (0, 3.0),
    "asleep": (2 * 3600, 61.0),
    "asleep for a weekend": (3 * DAY, 61.0),
    "going to sleep": (15, 61.0),
    "waking": (2 * 3600, 61.0),
    "lost": (240, 3.0),
    "silent": (240, 500.0),
    "older": (0, 0.0),
}
ARE_ASLEEP = ("asleep", "asleep for a weekend", "waking")


def put_state(laptop: Laptop, name: str, idle: float | None = None, **changed: Any) -> None:
    """Write the state of a head that has finished a run."""
    age, minutes = STATES[name]
    namespace = f"ray-on-ecs/{laptop.outputs['cluster_name']}"
    sleep: dict[str, Any] = {"wake": Wake(namespace, REGION, 60), "idle_minutes": idle or minutes}
    metadata = {"run_name": "old", "storage_path": f"s3://{laptop.outputs['bucket']}/runs", "max_resubmissions": "3"}
    ended = job("old", "SUCCEEDED", metadata=metadata)
    state = HeadState(jobs=[ended], **(sleep if name not in ("silent", "older") else {}), **changed)
    document = json.loads(state.to_json())
    if name == "older":
        document = {key: value for key, value in document.items() if key not in sleep}
    path = laptop.documents.path(HEAD)
    with laptop.documents.store.writing(path) as file:
        file.write(json.dumps(document).encode())
    laptop._age(path.partition("/")[2], age)
    if name == "waking":
        metadata = {**metadata, "run_name": "theirs"}
        laptop.documents.write_request("AROA:joe", RUN, uri="s3://b/runs/theirs", metadata=metadata)


def requested(laptop: Laptop) -> list[str]:
    """The requests for the head in the calls so far."""
    return [operation for operation, _ in laptop.front.asked if operation == "PutMetricData"]


@pytest.mark.parametrize("name", STATES)
def test_commands_that_read_need_no_head(laptop: Laptop, name: str) -> None:
    put_state(laptop, name)
    laptop.put_run("old", "finished", job="old", run_name="old", updated=moment(), metrics={}, step=1, loss=None)
    laptop.documents.write_log(job("old")["log"], 0, b"begins\nends\n")
    count = len(laptop.documents.requests())
    for words, status in (
        (("runs",), 0),
        (("logs", "old"), 0),
        (("logs", "--follow", "old"), 0),
        (("status",), 0),
        (("open", "--no-browser", "old"), 0),
        (("fetch", "old"), 0),
        (("stop", "old"), 2),
        (("rm", "--older-than", "1"), 0),
        (("rm", "old"), 0),
    ):
        done = run(laptop, *words)
        assert done[0] == status, (words, done)
        is_silent = name in ("silent", "lost") and words[0] not in ("open", "fetch")
        assert ("silent" in done[1] + done[2]) == is_silent, (words, done)
        assert "stale" not in done[2]
        assert words[0] != "runs" or re.search("old +finished", done[1])
    assert not requested(laptop)
    assert len(laptop.documents.requests()) == count


def status_of(laptop: Laptop) -> dict[str, str]:
    code, out, err = run(laptop, "status")
    assert (code, err) == (0, "")
    return shown(CompletedProcess((), code, out, err))


@pytest.mark.parametrize("name", STATES)
def test_status_names_a_head_that_sleeps(laptop: Laptop, name: str) -> None:
    node = {"kind": ray_status.HEAD, "pool": "", "instance_type": None, "zone": None, "market": None, "up_seconds": 900}
    nodes = [{**node, **dict.fromkeys(("gpus", "cpus", "gpus_used", "cpus_used"), 0.0)}]
    put_state(laptop, name, ray={"ray_version": "2.60.0", "nodes": nodes})
    rows = status_of(laptop)
    is_asleep = name in ARE_ASLEEP
    assert ("asleep since" in rows["head"]) == is_asleep
    assert rows["head"].endswith("ray-on-ecs run wakes it") == (is_asleep and name != "waking")
    assert ("the requested runs wake it" in rows["head"]) == (name == "waking")
    assert ("Ray 2.60.0" in rows["head"]) != is_asleep
    assert ("unknown while the head sleeps" in rows["cost"]) == is_asleep
    document = json.loads(run(laptop, "status", "--json")[1])
    assert (document["asleep_since"] is not None) == is_asleep


def test_cost_asleep_is_that_of_the_stack(laptop: Laptop) -> None:
    parts = {"NAT gateway": 0.05, "image": 0.0005, "dashboard": None}
    laptop.outputs["asleep_hourly_usd"] = parts
    Path(laptop.variables["RAY_ON_ECS_OUTPUTS"]).write_text(json.dumps(laptop.outputs))
    put_state(laptop, "asleep")
    assert status_of(laptop)["cost"] == (
        "0.05 USD an hour (37 a month) asleep: NAT gateway 0.050, image 0.001; dashboard, traffic, S3 and logs are "
        "extra; `pulumi destroy` ends it"
    )


@pytest.mark.parametrize("name", STATES)
def test_doctor_finds_no_fault_in_a_head_that_sleeps(laptop: Laptop, name: str) -> None:
    put_state(laptop, name)
    if name in ARE_ASLEEP:
        laptop.put_services(lambda _: {"desiredCount": 0, "runningCount": 0})
    _, out, err = run(laptop, "doctor", "--json")
    checks = {check["check"]: check for check in json.loads(out)["checks"]}
    assert (checks["head"]["state"] == "failed") == (name in ("silent", "lost")), out + err
    assert ("asleep since" in checks["head"]["line"]) == (name in ARE_ASLEEP)
    if name in ARE_ASLEEP:
        assert "none while the head sleeps" in checks["nodes"]["line"]
        assert checks["head's instance"]["state"] == "ok"
        assert len(laptop.documents.requests()) == (name == "waking"), "it leaves nothing to wake for"


def test_doctor_names_a_missing_permission(laptop: Laptop) -> None:
    put_state(laptop, "asleep")
    laptop.front.refused = {"PutMetricData"}
    checks = {check["check"]: check for check in json.loads(run(laptop, "doctor", "--json")[1])["checks"]}
    assert checks["head"]["state"] == "warning"
    assert "your runs can't wake it when it sleeps: access denied (" in checks["head"]["line"]


# Commands that wake


@pytest.fixture
def alarms(laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The alarms: they start a head after the first request. A list of the values of the requests."""
    values: list[float] = []
    publish, wait = wake.publish, wake.Waker.wait

    def note(of: Wake, data: Any) -> None:
        publish(of, data)
        values.extend(datum["Values"][0] for datum in data if datum["MetricName"] == HEAD_REQUESTED)

    def act(waker: wake.Waker, *arguments: Any) -> bool:
        told = wait(waker, *arguments)
        if values and not heads.jobs:
            heads.start()
        return told

    monkeypatch.setattr(wake, "publish", note)
    monkeypatch.setattr(wake.Waker, "wait", act)
    monkeypatch.setattr(dashboard, "hold_open", lambda port: None)
    return values


WAKING = (
    ("wake",),
    ("shell",),
    ("dashboard", "--no-browser"),
    ("notebook", "--no-browser"),
    ("run", "--detach", *TYPED[1:]),
)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((words, "asleep") for words in WAKING),
        *(
            (words, name)
            for words in (WAKING[0], WAKING[1], WAKING[4])
            for name in ("waking", "going to sleep", "lost")
            if (words[0], name) != ("shell", "lost")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_command_that_needs_a_head_wakes_it(
    laptop: Laptop, heads: Heads, alarms: list[float], words: tuple[str, ...], name: str
) -> None:
    put_state(laptop, name)
    status, out, err = run(laptop, *words)
    if words[0] == "notebook":  # the stand-in of Ray takes no job
        assert "the Ray head did not accept the job of the notebook" in err
    else:
        assert status == 0, out + err
    assert alarms
    assert ("; the cluster wakes in " in err) == (name in ARE_ASLEEP)
    assert heads.documents.read_head()[1].head, "a new head is up"
    until(lambda: not [request for request in heads.documents.requests() if "joe" not in str(request)])


@pytest.mark.parametrize("words", [WAKING[0], WAKING[4]], ids=lambda words: words[0])
def test_user_with_the_bucket_alone_wakes_the_head(
    laptop: Laptop, heads: Heads, alarms: list[float], words: tuple[str, ...]
) -> None:
    """Also without a region: the state has it."""
    laptop.variables |= {"RAY_ON_ECS_CLUSTER": f"s3://{laptop.outputs['bucket']}", "RAY_ON_ECS_OUTPUTS": ""}
    laptop.variables |= {"AWS_REGION": "", "AWS_DEFAULT_REGION": ""}
    put_state(laptop, "asleep")
    status, _, err = run(laptop, *words)
    assert status == 0, err
    assert wake.PARTS in err
    assert len(heads.jobs) == 1


@pytest.mark.parametrize("words", WAKING[1:4], ids=lambda words: words[0])
def test_connection_without_a_stack_wakes_nothing(laptop: Laptop, words: tuple[str, ...]) -> None:
    laptop.variables |= {"RAY_ON_ECS_CLUSTER": f"s3://{laptop.outputs['bucket']}", "RAY_ON_ECS_OUTPUTS": ""}
    put_state(laptop, "asleep")
    assert "Ray needs --stack or --outputs" in run(laptop, *words)[2]
    assert not requested(laptop)


@pytest.mark.parametrize("words", WAKING[:4], ids=lambda words: words[0])
def test_head_that_is_awake_is_left_alone(laptop: Laptop, alarms: list[float], words: tuple[str, ...]) -> None:
    put_state(laptop, "awake")
    assert "asleep" not in run(laptop, *words)[2]
    assert not alarms
    assert not laptop.documents.requests()


@pytest.mark.parametrize("name", ["lost", "silent"])
@pytest.mark.parametrize("words", WAKING[1:4], ids=lambda words: words[0])
def test_connection_does_not_wait_for_a_silent_head(
    laptop: Laptop, alarms: list[float], words: tuple[str, ...], name: str
) -> None:
    put_state(laptop, name)
    status, out, err = run(laptop, *words)
    assert "waiting for the head" not in err
    assert status == 0 or words[0] == "notebook", out + err  # the stand-in of Ray takes no job
    assert not alarms
    assert not laptop.documents.requests()


def test_connection_to_a_head_that_is_up_needs_no_request(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **content: Any) -> None:
        raise StorageFault(ResourceError("access denied"))

    put_state(laptop, "awake", idle=56.0)
    monkeypatch.setattr(Documents, "write_request", refuse)
    status, out, err = run(laptop, "shell")
    assert status == 0, out + err
    assert requested(laptop)


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("awake", 0, "the cluster is awake; it sleeps after 60 idle minutes"),
        ("older", 0, "the cluster is awake, and does not sleep"),
        ("silent", 3, "the head is silent, and not asleep: its stack has no sleepAfterMinutes"),
    ],
)
def test_wake_of_a_head_that_is_not_asleep(laptop: Laptop, name: str, status: int, says: str) -> None:
    put_state(laptop, name)
    code, _, err = run(laptop, "wake")
    assert (code, says in err) == (status, True), err
    assert not requested(laptop)


def test_wake_is_for_a_stack(laptop: Laptop) -> None:
    status, _, err = run(laptop, "wake", "--local")
    assert (status, "does not sleep" in err) == (2, True)


def test_state_of_a_newer_version_wakes_nothing(laptop: Laptop) -> None:
    with laptop.documents.store.writing(laptop.documents.path(HEAD)) as file:
        file.write(b'{"format": 2}')
    for words in (("wake",), ("run", "--detach", *TYPED[1:])):
        assert "its format is 2, and this version's is 1" in run(laptop, *words)[2]
    assert run(laptop, "shell")[0] == 0, "the session says itself what is wrong"
    assert not requested(laptop)


@pytest.mark.parametrize("words", WAKING, ids=lambda words: words[0])
def test_user_who_may_not_wake_gets_one_line_and_leaves_nothing(laptop: Laptop, words: tuple[str, ...]) -> None:
    put_state(laptop, "asleep")
    laptop.front.refused = {"PutMetricData"}
    status, out, err = run(laptop, *words, **({"TOKEN": "hf_12345"} if words[0] == "run" else {}))
    assert status == 3, out + err
    line = err.splitlines()[-1]
    assert line.startswith("ray-on-ecs: the cluster is asleep, and can't be woken: access denied (")
    assert not laptop.documents.requests()


def test_refused_wake_deletes_the_secrets_of_the_run(laptop: Laptop) -> None:
    put_state(laptop, "asleep")
    laptop.front.refused = {"PutMetricData"}
    assert_secret_is_deleted(laptop, status=3)


def test_ctrl_c_before_the_request_deletes_the_secrets(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    put_state(laptop, "asleep")
    monkeypatch.setattr(wake, "publish", interrupt)
    assert_secret_is_deleted(laptop, status=130)


def assert_secret_is_deleted(laptop: Laptop, status: int) -> None:
    words = ("run", "--detach", "--secret", "TOKEN", *TYPED[1:])
    assert run(laptop, *words, TOKEN="hf_12345")[0] == status
    names = [parameter["Name"] for parameter in laptop.aws("ssm").describe_parameters()["Parameters"]]
    assert not any("TOKEN" in name for name in names)


@pytest.mark.parametrize("refused", ["AccessDeniedException", "ThrottlingException"])
def test_failed_request_does_not_fail_a_run_on_a_head_that_is_up(
    laptop: Laptop, heads: Heads, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    state = remote.RemoteJobs.state

    def sleeping(jobs: remote.RemoteJobs) -> tuple[HeadState, float]:
        head, age = state(jobs)
        return replace(head, wake=Wake("ray-on-ecs/c", REGION, 60), idle_minutes=61.0), age

    monkeypatch.setattr(remote.RemoteJobs, "state", sleeping)
    heads.start()
    until(lambda: heads.documents.head_age()[0])
    laptop.front.codes["PutMetricData"] = refused
    status, out, err = run(laptop, "run", "--detach", *TYPED[1:])
    assert (status, out) == (0, "run mine is submitted as job mine\n"), err
    assert "cloudwatch" not in err


def test_missing_plugin_is_said_before_the_wake(laptop: Laptop, alarms: list[float]) -> None:
    put_state(laptop, "asleep")
    status, _, err = run(laptop, "shell", PATH="/usr/bin:/bin")
    assert (status, "command not found: session-manager-plugin" in err) == (2, True)
    assert not alarms


@pytest.mark.parametrize("words", [("wake",), ("shell",), TYPED], ids=lambda words: words[0])
def test_ctrl_c_during_the_wake_leaves_no_request(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    put_state(laptop, "asleep")
    wait = wake.Waker.wait

    def interrupt(waker: wake.Waker, *arguments: Any) -> bool:
        assert len(laptop.documents.requests()) == 1, "it is published first"
        wait(waker, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(wake.Waker, "wait", interrupt)
    status, _, err = run(laptop, *words)
    assert status == 130, err
    assert requested(laptop)
    assert not laptop.documents.requests()


def test_request_is_published_before_it_is_written(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    put_state(laptop, "asleep")
    counts: list[int] = []

    def note(of: Wake, data: Any) -> None:
        counts.append(len(laptop.documents.requests()))
        raise KeyboardInterrupt

    monkeypatch.setattr(wake, "publish", note)
    for words in (("wake",), TYPED):
        run(laptop, *words)
    assert counts == [0, 0]


def test_workers_of_the_run_wake_with_the_head(laptop: Laptop, alarms: list[float]) -> None:
    group = {"pool": "h100", "zones": ["us-east-1c"], "types": ["p5.48xlarge"], "gpu": "H100", "units": 8, "max": 2}
    group |= {"min": 0, "spot": False, "default_nodes": 2, "idle_minutes": 30, "group": "g", "provider": "p"}
    put_state(laptop, "asleep", ray={"groups": {"h100-workers": {**group, "disk_usd": 0.0}}})
    assert run(laptop, "run", "--detach", "--gpu", "H100", *TYPED[1:])[0] == 0
    metrics = laptop.aws("cloudwatch").list_metrics(Namespace=f"ray-on-ecs/{laptop.outputs['cluster_name']}")["Metrics"]
    names = {metric["MetricName"]: metric["Dimensions"] for metric in metrics}
    assert names["GPUsRequested"] == names["GPUs"] == [{"Name": "Workers", "Value": "h100-workers"}]


def test_two_commands_wake_one_head_for_two_runs(laptop: Laptop, heads: Heads, alarms: list[float]) -> None:
    put_state(laptop, "asleep")
    theirs = {"run_name": "theirs", "storage_path": f"s3://{laptop.outputs['bucket']}/runs"}
    laptop.documents.write_request("AROA:joe", RUN, uri=f"{theirs['storage_path']}/theirs", metadata=theirs)
    assert run(laptop, "run", "--detach", *TYPED[1:])[0] == 0
    until(lambda: heads.listed.keys() == {"old", "mine", "theirs"})
    assert len(heads.jobs) == 1


def test_second_command_for_a_run_follows_the_first(laptop: Laptop, heads: Heads) -> None:
    put_state(laptop, "asleep")
    metadata = {"run_name": "mine", "storage_path": f"s3://{laptop.outputs['bucket']}/runs"}
    request = laptop.documents.write_request("AROA:joe", RUN, uri=f"{metadata['storage_path']}/mine", metadata=metadata)
    detached = run(laptop, "run", "--detach", *TYPED[1:])
    assert detached[0] == 0
    assert detached[1].startswith(f"run mine is already active as job {request}, ")

    def start() -> None:
        heads.start()
        until(lambda: heads.log("mine"), between=0.05)
        heads.end()

    thread, errors = scenario(start)
    status, out, err = run(laptop, *TYPED)
    thread.join()
    assert not errors
    assert (status, out.splitlines()[-1]) == (0, "ends"), err
    assert heads.listed.keys() == {"old", "mine"}
    assert not requested(laptop), "the first one asks for the head"


def test_stop_withdraws_a_request_of_a_cluster_that_sleeps(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that waits with it ends."""
    put_state(laptop, "asleep")
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.05)
    waits = threading.Event()
    wait = wake.Waker.wait
    monkeypatch.setattr(wake.Waker, "wait", lambda *arguments: waits.set() or wait(*arguments))
    user = laptop.aws("sts").get_caller_identity()["UserId"]
    stored = json.dumps([f"s3://{laptop.outputs['bucket']}/runs/mine", "TOKEN"])
    metadata = {"run_name": "mine", "storage_path": f"s3://{laptop.outputs['bucket']}/runs", SECRETS: stored}
    ends: list[BaseException] = []

    def submit() -> None:
        jobs = remote.RemoteJobs(laptop.documents, lambda: user, lambda line: None, waker=wake.Waker(lambda line: None))
        try:
            jobs.submit("s3://b/runs/mine", metadata)
        except BaseException as end:
            ends.append(end)

    for name, value in laptop.variables.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    thread = threading.Thread(target=submit)
    thread.start()
    assert waits.wait(60)
    status, _, err = run(laptop, "stop", "mine")
    assert status == 0, err
    thread.join(60)
    assert "run mine was stopped before it began" in str(ends[0])
    assert not laptop.documents.requests()


def test_session_with_a_head_without_an_instance_is_one_line(laptop: Laptop) -> None:
    """The outputs of a stack that sleeps have no instance."""
    put_state(laptop, "awake")
    laptop.outputs["head_instance_id"] = ""
    Path(laptop.variables["RAY_ON_ECS_OUTPUTS"]).write_text(json.dumps(laptop.outputs))
    status, _, err = run(laptop, "shell")
    assert (status, err) == (3, err)
    assert err.startswith("ray-on-ecs: the head has no task on an instance: it is starting, or sleeps")
    checks = {check["check"]: check for check in json.loads(run(laptop, "doctor", "--json")[1])["checks"]}
    assert checks["head's instance"]["state"] == "warning"


def test_stack_that_is_gone_is_not_awaited(laptop: Laptop) -> None:
    put_state(laptop, "asleep")
    laptop.front.codes["DescribeServices"] = "ClusterNotFoundException"
    for words in (("shell",), TYPED):
        status, _, err = run(laptop, *words)
        assert status == 3, err
        assert "stack dev is down, or in another account" in err.splitlines()[-1]
    assert not laptop.documents.requests()


@pytest.mark.parametrize("status", ["FAILED", "RUNNING"])
def test_run_that_a_head_has_lost_days_ago_is_over(laptop: Laptop, status: str) -> None:
    """The next head does not continue it, so no command shows it as under way."""
    metadata = {"run_name": "mine", "storage_path": f"s3://{laptop.outputs['bucket']}/runs", "max_resubmissions": "3"}
    lost = {**job("mine", status, metadata=metadata), "driver_exit_code": None}
    laptop.documents.write_head(HeadState(jobs=[lost]), None)
    laptop._age(laptop.documents.path(HEAD).partition("/")[2], 2 * DAY)
    assert run(laptop, "stop", "mine")[0] == 2
