"""`ray-on-ecs doctor`: each fault is a separate line with a command to type, and dependent checks are skipped."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.cli import check_aws, doctor
from ray_on_ecs.cluster import aws, head, session
from ray_on_ecs.node import labels
from tests.ray_on_ecs.cli.account import BIN, Laptop

shorten_timeouts = doctor._shorten_timeouts
ALL = [
    *("AWS CLI", "Session Manager plugin", "stack", "clock", "credentials", "region", "parameters", "quota", "bucket"),
    *("services", "workers", "head's instance", "Ray", "version", "nodes", "code"),
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
    assert done.stdout.splitlines()[0] == "ok  AWS CLI: aws-cli/2.31.0"
    assert line_of(done, "quota") == "Running On-Demand G and VT instances: 64 vCPUs, 8 needed | "
    assert line_of(done, "bucket") == f"{stack.outputs['bucket']}/runs/ can be read and written | "
    assert line_of(done, "nodes") == "2 and the head | "
    assert (
        line_of(done, "workers")
        == "2 instances of GPU workers; the stack's instances cost 140 USD a month while idle | "
    )
    assert not stack.aws("s3").list_objects_v2(Bucket=stack.outputs["bucket"]).get("Contents")


def test_process_exits_with_1_after_a_failed_check(stack: Laptop) -> None:
    stack.outputs = {}
    done = stack.run_process("doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert line_of(done, "stack").endswith("is not up; pulumi up creates it | pulumi up")


def test_json_lists_all_checks(stack: Laptop) -> None:
    document = json.loads(stack.run("doctor", "--json").stdout)
    assert document["ok"] is True
    assert [result["check"] for result in document["checks"]] == ALL
    assert document["checks"][0] == {"check": "AWS CLI", "state": "ok", "line": "aws-cli/2.31.0", "type": ""}


def test_missing_plugin_has_installation_instructions(stack: Laptop, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aws").symlink_to(BIN / "aws")
    done = stack.run("doctor", PATH=f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    failed(done, "Session Manager plugin")
    assert "command not found: session-manager-plugin | " in line_of(done, "Session Manager plugin")
    assert "session-manager-downloads/plugin/latest/" in line_of(done, "Session Manager plugin")
    assert line_of(done, "Ray") == "not checked without Session Manager plugin | "
    assert states(done)["services"] == "ok"


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


def test_wrong_token(stack: Laptop) -> None:
    stack.put_token("of-another")
    done = stack.run("doctor")
    failed(done, "Ray")
    assert line_of(done, "Ray").startswith("the Ray head refuses the token; ")


def test_head_during_replacement(stack: Laptop) -> None:
    stack.replace_service("head", 0)
    done = stack.run("doctor")
    failed(done, "services")
    assert "head 0 of 1 running, workers 2 of 2 running: the head is starting or being" in line_of(done, "services")
    assert " | aws logs tail --since 1h --region us-east-1 " in line_of(done, "services")


def test_starting_workers_are_not_a_failure(stack: Laptop) -> None:
    stack.replace_service("workers", 1)
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    assert states(done)["services"] == "!"


def test_failed_deployment_is_named(stack: Laptop) -> None:
    stack.fail_deployment("workers", "ECS deployment circuit breaker: tasks failed to start.")
    done = stack.run("doctor")
    failed(done, "workers")
    assert line_of(done, "workers").startswith(
        "workers: the last deployment failed: ECS deployment circuit breaker: tasks failed to start; pulumi config set "
        "redeployWorkers WORD and pulumi up try again | aws logs tail"
    )


def test_unhealthy_instance_is_named(stack: Laptop) -> None:
    instance_id = stack.mark_unhealthy()
    done = stack.run("doctor")
    assert states(done)["workers"] == "!"
    assert line_of(done, "workers").startswith(f"{instance_id} is marked unhealthy, such as for a GPU that fails; Auto")


def test_task_ended_by_scale_in_is_ignored(stack: Laptop) -> None:
    stack.replace_service("workers", 1)
    stack.stop_task({"stoppedReason": "Scaling activity initiated by (deployment ecs-svc/1)"})
    assert "Scaling activity" not in line_of(stack.run("doctor"), "services")


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"containers": [{"exitCode": 4}]}, "a GPU is missing or does not compute (its log says which)"),
        ({"stoppedReason": "Task failed ELB health checks"}, "the last task stopped: Task failed ELB health checks"),
        ({"containers": [{"exitCode": 137}], "stoppedReason": "OutOfMemory"}, "the last task stopped: OutOfMemory"),
    ],
)
def test_stopped_task_has_its_reason(
    stack: Laptop, stop_after: Callable[[str], None], task: dict[str, Any], says: str
) -> None:
    stop_after("services")
    stack.replace_service("workers", 1)
    stack.stop_task(task)
    assert says in line_of(stack.run("doctor"), "services")


@pytest.mark.parametrize(("seconds", "state"), [(3600, "failed"), (-3600, "failed"), (100, "warning"), (3, "ok")])
def test_wrong_clock(
    stack: Laptop, stop_after: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, seconds: int, state: str
) -> None:
    stop_after("credentials")
    now = 1_700_000_000
    answer = SimpleNamespace(headers={"Date": formatdate(now, usegmt=True)})
    monkeypatch.setattr(check_aws, "requests", SimpleNamespace(head=lambda *_, **__: answer))
    monkeypatch.setattr(check_aws, "time", SimpleNamespace(time=lambda: now + seconds))
    done = stack.run("doctor")
    assert states(done)["clock"] == doctor.MARKS[state].strip(), done.stdout
    assert done.returncode == (state == "failed")
    if state == "failed":
        assert f"s {'ahead of' if seconds > 0 else 'behind'} AWS, which refuses signatures" in line_of(done, "clock")
        assert states(done)["credentials"] == SKIPPED


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


def test_other_region_in_the_environment_is_a_note(stack: Laptop, stop_after: Callable[[str], None]) -> None:
    stop_after("region")
    done = stack.run("doctor", AWS_REGION="eu-west-1")
    assert done.returncode == 0, done.stdout
    assert "eu-west-1, is for other commands" in line_of(done, "region")


def test_insufficient_quota(stack: Laptop) -> None:
    stack.front.answers["GetServiceQuota"] = {"Quota": {"QuotaName": "Running On-Demand G", "Value": 4.0}}
    done = stack.run("doctor")
    failed(done, "quota")
    assert line_of(done, "quota") == (
        "Running On-Demand G: 4 vCPUs, and 2 x g5.xlarge need 8; AWS decides on a request | aws service-quotas "
        "request-service-quota-increase --service-code ec2 --quota-code L-DB2E81BA --desired-value 8 --region us-east-1"
    )


def test_missing_bucket(stack: Laptop) -> None:
    stack.delete_bucket()
    done = stack.run("doctor")
    failed(done, "bucket")
    assert line_of(done, "bucket").endswith(" | pulumi up")


def test_read_only_bucket(stack: Laptop) -> None:
    stack.front.refused = {f"PUT /{stack.outputs['bucket']}/"}
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    assert "can be read, which is enough to fetch, but s3:PutObject is denied" in line_of(done, "bucket")


def test_bucket_without_list_permission(stack: Laptop) -> None:
    stack.front.refused = {f"GET /{stack.outputs['bucket']}?list-type"}
    done = stack.run("doctor")
    failed(done, "bucket")
    assert "s3:ListBucket" in line_of(done, "bucket")


def test_denied_aws_calls_are_not_failures(stack: Laptop) -> None:
    stack.front.refused = {"DescribeInstanceInformation", "GetServiceQuota", "DescribeRegions"}
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    marks = states(done)
    assert {check for check, mark in marks.items() if mark == "!"} == {"head's instance", "quota", "region"}
    assert line_of(done, "quota").startswith("unknown, AWS denies access ")


def test_instance_lost_by_session_manager(stack: Laptop) -> None:
    stack.front.answers["DescribeInstanceInformation"] = {"InstanceInformationList": []}
    done = stack.run("doctor")
    failed(done, "head's instance")
    assert f"Session Manager does not reach {stack.outputs['head_instance_id']}" in line_of(done, "head's instance")


def test_refused_session(stack: Laptop) -> None:
    done = stack.run("doctor", AWS_STAND_IN_REFUSES="TargetNotConnected")
    failed(done, "Ray")
    assert line_of(done, "Ray").startswith("the head's instance is not connected to Session Manager")


def test_other_versions_and_other_code_are_notes(stack: Laptop) -> None:
    stack.head.version = "2.59.0"
    stack.head.nodes[0]["labels"]["code"] = "0123456789ab"
    done = stack.run("doctor")
    assert done.returncode == 0, done.stdout
    assert line_of(done, "version").endswith(" | pip install 'ray[default]==2.59.0'")
    assert line_of(done, "code") == (
        f"the code in the image (0123456789ab) differs from the code here ({labels.fingerprint()}) | pulumi up"
    )


def test_ended_nodes_are_named(stack: Laptop) -> None:
    lost = {
        "state": "DEAD",
        "end_time_ms": 1000 * (time.time() - 60),
        "state_message": "Unexpected termination: health check failed",
    }
    stack.head.nodes[1] |= lost
    done = stack.run("doctor")
    assert states(done)["nodes"] == "!"
    assert line_of(done, "nodes").startswith("1 and the head; 1 ended unexpectedly within an hour, the last one: ")


def test_unreachable_aws_fails_the_clock_check(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.0/24 is reserved for documentation and never answers."""
    monkeypatch.setattr(check_aws, "ANSWER_SECONDS", 0.1)
    done = stack.run("doctor", AWS_ENDPOINT_URL="http://192.0.2.77:9")
    failed(done, "clock")
    assert "AWS can't be reached" in line_of(done, "clock")


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
    assert max(session.OPEN_SECONDS, head.REQUEST_SECONDS) <= 10


def test_no_check_starts_after_the_time_limit(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "START_SECONDS", -1)
    assert set(states(stack.run("doctor")).values()) == {SKIPPED}
