"""`ray-on-ecs doctor`: each fault is a separate line with a command to type, and dependent checks are skipped."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_on_ecs.cli import doctor
from ray_on_ecs.cluster import aws
from ray_on_ecs.jobs import documents
from ray_on_ecs.node import labels
from tests.ray_on_ecs.cli.account import Laptop

shorten_timeouts = doctor._shorten_timeouts
ALL = [
    *("stack", "credentials", "bucket", "parameters", "workers", "services", "head", "nodes", "scale-in", "code"),
    *("Session Manager plugin", "head's instance"),
]
SKIPPED = doctor.MARKS["skipped"].strip()


@pytest.fixture
def stack(stack: Laptop) -> Laptop:
    """A stack and a laptop without faults."""
    stack.head.add_worker()
    stack.head.add_worker()
    return stack


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that leaves out the checks after this one, on which they have no effect."""

    def call(last: str) -> None:
        names = [check.name for check in doctor.ON_AWS]
        monkeypatch.setattr(doctor, "ON_AWS", doctor.ON_AWS[: names.index(last) + 1])

    return call


def states(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The mark of each check."""
    lines = [line for line in done.stdout.splitlines() if not line.startswith("      ")]
    return {line[4:].partition(":")[0]: line[:2].strip() for line in lines}


def line_of(done: subprocess.CompletedProcess[str], check: str) -> str:
    """The line of a check, and the command to type."""
    lines = done.stdout.splitlines()
    [index] = [index for index, line in enumerate(lines) if line[4:].startswith(f"{check}: ")]
    fix = lines[index + 1].strip() if lines[index + 1 :] and lines[index + 1].startswith("      ") else ""
    return f"{lines[index][4:].partition(': ')[2]} | {fix}"


def failed(done: subprocess.CompletedProcess[str], *checks: str) -> None:
    """Check that only these checks fail, and that dependent checks are skipped."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert [check for check, mark in states(done).items() if mark == "✗"] == list(checks), done.stdout
    assert done.stderr == ""


def test_all_checks_pass(stack: Laptop) -> None:
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(done) == dict.fromkeys(ALL, "ok")
    assert re.fullmatch(r"wrote its state \d+ s ago; Ray .* \| ", line_of(done, "head"))
    assert line_of(done, "bucket") == f"s3://{stack.outputs['bucket']}/runs can be read and written | "
    assert line_of(done, "nodes") == "2 and the head | "
    assert line_of(done, "workers") == "2 of 2 workers in service | "
    assert line_of(done, "scale-in") == "idle workers stop after 30 minutes | "
    left = stack.aws("s3").list_objects_v2(Bucket=stack.outputs["bucket"]).get("Contents", ())
    others = [item["Key"] for item in left if not item["Key"].endswith(("head.json", "bell", "runs/"))]
    assert others
    assert all("/requests/" in key for key in others), "empty ones, which the head deletes"


def test_json_lists_all_checks(stack: Laptop) -> None:
    document = json.loads(stack.run("doctor", "--json").stdout)
    assert document["ok"] is True
    assert [result["check"] for result in document["checks"]] == ALL
    line = "2 of 2 workers in service"
    assert document["checks"][4] == {"check": "workers", "state": "ok", "line": line, "type": ""}


def test_missing_plugin_has_installation_instructions(stack: Laptop) -> None:
    done = stack.run("doctor", PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert done.returncode == 0, done.stdout
    assert {check for check, mark in states(done).items() if mark != "ok"} == {"Session Manager plugin"}
    line = line_of(done, "Session Manager plugin")
    assert line.startswith(
        "command not found: session-manager-plugin; install it: https://docs.aws.amazon.com/systems-"
    )
    assert "; dashboard, notebook and shell need it | " in line


def test_stack_requires_pulumi_or_a_file(stack: Laptop) -> None:
    done = stack.run_alone("doctor")
    failed(done, "stack")
    assert "command not found: pulumi" in line_of(done, "stack")
    assert states(done)["code"] == SKIPPED


@pytest.mark.parametrize(
    ("text", "says", "types"),
    [
        (None, "can't be read", "pulumi stack output --json > {file}"),
        ("{}", "is not up; pulumi up creates it", "pulumi up"),
        ('{"bucket": "b"}', "has no output ", "pulumi stack output --json > {file}"),
    ],
)
def test_outputs_of_no_stack(stack: Laptop, tmp_path: Path, text: str | None, says: str, types: str) -> None:
    file = tmp_path / "mine.json"
    if text:
        file.write_text(text)
    done = stack.run_alone("doctor", "--outputs", str(file))
    failed(done, "stack")
    assert says in line_of(done, "stack")
    assert line_of(done, "stack").endswith(f" | {types.format(file=file)}")


def test_stack_that_is_down(stack: Laptop) -> None:
    stack.delete_token()
    done = stack.run("doctor")
    failed(done, "parameters")
    assert "is down, or in another account" in line_of(done, "parameters")
    assert line_of(done, "parameters").endswith(" | pulumi up")


def test_head_during_replacement(stack: Laptop) -> None:
    stack.replace_service("head", 0)
    done = stack.run("doctor")
    failed(done, "services")
    assert "head 0 of 1 running, workers 2 of 2 running; head: AWS gives" in line_of(done, "services")
    assert " | aws logs tail --since 1h --region us-east-1 " in line_of(done, "services")


def test_starting_workers_are_not_a_failure(stack: Laptop) -> None:
    stack.replace_service("workers", 1)
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    assert states(done)["services"] == "!"


def test_failed_deployment_is_named(stack: Laptop) -> None:
    reason = "ECS deployment circuit breaker: tasks failed to start."
    stack.put_deployments("workers", {"status": "PRIMARY", "rolloutState": "FAILED", "rolloutStateReason": reason})
    done = stack.run("doctor")
    failed(done, "services")
    assert line_of(done, "services").startswith(
        "head 1 of 1 running, workers 2 of 2 running; workers: the last deployment failed: ECS deployment "
        "circuit breaker: tasks failed to start; while a run waits, the head tries again after 10 minutes; "
        "pulumi config set redeployWorkers WORD and pulumi up does at once | aws"
    )


def test_unhealthy_instance_is_named(stack: Laptop) -> None:
    instance_id = stack.mark_unhealthy()
    done = stack.run("doctor")
    assert states(done)["workers"] == "!"
    assert line_of(done, "workers").startswith(f"2 of 2 workers in service; unhealthy, being replaced: {instance_id}")


def test_missing_credentials(stack: Laptop) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del stack.variables[name]
    done = stack.run("doctor")
    failed(done, "credentials")
    assert "AWS credentials are missing or expired" in line_of(done, "credentials")
    assert " | aws sso login " in line_of(done, "credentials")
    done = stack.run("doctor", AWS_PROFILE="nobody")
    failed(done, "credentials")
    assert "nobody" in line_of(done, "credentials")


BUCKET_FAULTS: dict[str, Callable[[Laptop], None]] = {
    "none": lambda stack: None,
    "the bucket is missing": lambda stack: stack.delete_bucket(),
    "a list is denied": lambda stack: stack.refuse("GET /{bucket}?list-type"),
    "a document is denied": lambda stack: stack.refuse("GET /{bucket}/runs/"),
    "all is denied": lambda stack: stack.refuse("GET /{bucket}", "HEAD /{bucket}", "PUT /{bucket}"),
    "S3 has no address": lambda stack: stack.variables.update(AWS_ENDPOINT_URL_S3="http://s3.of-a.invalid"),
    "a proxy alone reaches AWS": lambda stack: stack.variables.update(
        AWS_ENDPOINT_URL="http://aws.of-a.invalid", HTTP_PROXY=stack.front.url, http_proxy=stack.front.url
    ),
    "S3 is another program's": lambda stack: stack.variables.update(AWS_ENDPOINT_URL_S3="http://127.0.0.1:9"),
}


@pytest.mark.parametrize("fault", BUCKET_FAULTS)
def test_bucket_is_ok_only_if_runs_and_fetch_read_it(
    stack: Laptop, stop_after: Callable[[str], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after("bucket")
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    stack.put_run("first")
    BUCKET_FAULTS[fault](stack)
    done = stack.run("doctor")
    runs, fetch = stack.run("runs"), stack.run("fetch", "first")
    are_read = runs.returncode == fetch.returncode == 0 and "unreadable" not in runs.stdout
    assert are_read is (fault in ("none", "a proxy alone reaches AWS"))
    assert states(done)["bucket"] == ("ok" if are_read else "✗"), done.stdout
    assert "Traceback" not in done.stderr + runs.stderr + fetch.stderr


def test_bucket_of_a_stack_that_is_down(stack: Laptop) -> None:
    stack.delete_bucket()
    done = stack.run("doctor")
    failed(done, "bucket")
    assert line_of(done, "bucket").endswith(" | pulumi up")


def test_read_only_bucket(stack: Laptop, stop_after: Callable[[str], None]) -> None:
    stop_after("bucket")
    stack.refuse("PUT /{bucket}/")
    done = stack.run("doctor")
    assert (done.returncode, states(done)["bucket"]) == (0, "!"), done.stdout
    assert "can be read, which is enough to fetch, but " in line_of(done, "bucket")


def test_alarm_that_does_not_stop_idle_workers_is_named(stack: Laptop) -> None:
    name = f"{stack.outputs['cluster_name']}-workers-idle"
    cloudwatch = stack.aws("cloudwatch")
    cloudwatch.disable_alarm_actions(AlarmNames=[name])
    line = line_of(stack.run("doctor"), "scale-in")
    assert line.startswith(
        f"idle workers keep running: the actions of alarm {name} are disabled; 2 idle workers cost 2.01 USD an hour "
        "meanwhile | aws cloudwatch enable-alarm-actions "
    )
    cloudwatch.delete_alarms(AlarmNames=[name])
    done = stack.run("doctor")
    assert line_of(done, "scale-in").startswith(f"idle workers keep running: alarm {name} is missing; 2 idle workers ")
    assert line_of(done, "scale-in").endswith(" | pulumi up")
    stack.put_alarm("workers")
    assert done.returncode == 0
    stack.put_workers({"workers": {"min": 2}})
    assert states(stack.run("doctor"))["scale-in"] == "ok"


def test_denied_aws_calls_are_not_failures(stack: Laptop) -> None:
    stack.front.refused = {"DescribeInstanceInformation", "DescribeAlarms", "DescribeAutoScalingGroups"}
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    marks = states(done)
    assert {check for check, mark in marks.items() if mark == "!"} == {"head's instance", "workers", "scale-in"}
    assert line_of(done, "workers").startswith("unknown, AWS denies access ")


def test_instance_lost_by_session_manager(stack: Laptop) -> None:
    stack.front.answers["DescribeInstanceInformation"] = {"InstanceInformationList": []}
    done = stack.run("doctor")
    assert (done.returncode, states(done)["head's instance"]) == (0, "!"), done.stdout
    assert f"Session Manager does not reach {stack.outputs['head_instance_id']}" in line_of(done, "head's instance")


@pytest.mark.parametrize(
    ("is_up", "seconds", "says"),
    [(False, 0, "the head has not written its state yet"), (True, 240, "the head wrote its state 0:04:0")],
)
def test_head_without_a_fresh_state(stack: Laptop, is_up: bool, seconds: float, says: str) -> None:
    stack.head.is_up, stack.head.silent_seconds = is_up, seconds
    done = stack.run("doctor")
    failed(done, "head")
    assert line_of(done, "head").startswith(says)
    assert states(done)["code"] == SKIPPED


def test_head_of_another_version(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "FORMAT", 2)
    stack.put_state()
    monkeypatch.undo()
    done = stack.run("doctor", with_state=False)
    failed(done, "head")
    assert "its format is 2, and this version's is 1): pulumi up gives the head" in line_of(done, "head")


def test_user_who_may_not_request_runs(stack: Laptop) -> None:
    stack.refuse("PUT /{bucket}/clusters/{cluster_name}/requests")
    done = stack.run("doctor")
    assert (done.returncode, states(done)["head"]) == (0, "!"), done.stdout
    assert "but takes no request of yours (" in line_of(done, "head")


def test_other_code_is_a_note(stack: Laptop) -> None:
    stack.head.code = "0123456789ab"
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    assert line_of(done, "code") == (
        f"the code in the image (0123456789ab) differs from the code here ({labels.fingerprint()}) | pulumi up"
    )


def test_missing_nodes_are_named(stack: Laptop) -> None:
    stack.head.nodes[1] |= {"state": "DEAD"}
    done = stack.run("doctor")
    assert states(done)["nodes"] == "!"
    assert line_of(done, "nodes").startswith("1 and the head, and ECS runs 2 tasks of them: they are starting, or have")


def test_head_whose_ray_is_silent(stack: Laptop) -> None:
    stack.head.has_ray = False
    done = stack.run("doctor")
    assert line_of(done, "head").endswith(", and waits for Ray | ")
    assert line_of(done, "nodes").startswith("0 and the head")


def test_silent_aws_has_a_timeout(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "READ_SECONDS", 1.0)
    monkeypatch.setattr(aws, "ATTEMPTS", 3)
    monkeypatch.setattr(doctor, "_shorten_timeouts", shorten_timeouts)
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.1)
    stack.front.is_silent = True
    done = stack.run("doctor")
    failed(done, "credentials")
    assert "AWS can't be reached" in line_of(done, "credentials")
    assert (aws.CONNECT_SECONDS, aws.READ_SECONDS, aws.ATTEMPTS) == (0.1, 0.1, 2)


def test_in_the_heads_container_the_connection_is_not_checked(stack: Laptop) -> None:
    results = stack.folder / "results"
    done = stack.run_alone("doctor", RAY_ON_ECS_CLUSTER="head", RAY_ON_ECS_STORAGE_PATH=str(results))
    assert (done.returncode, states(done)) == (0, {"cluster": "ok", "bucket": "ok"}), done.stdout
