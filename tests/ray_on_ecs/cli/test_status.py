"""`ray-on-ecs status` of a stack: the state of Ray and AWS, without values that AWS refuses."""

import json
import re
from datetime import UTC, datetime
from subprocess import CompletedProcess

import pytest

from tests.ray_on_ecs.cli.account import NO_CAPACITY, Laptop

SPOT_USD = 0.00001  # moto's price of all types
MINIMUM = {"workers": {"min": 1, "max": 2, "idle_minutes": 60}}
NEVER = {"workers": {"min": 0, "max": 2, "idle_minutes": 0}}
FAILED = """<DescribeScalingActivitiesResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">
<DescribeScalingActivitiesResult><Activities><member><ActivityId>1</ActivityId>
<AutoScalingGroupName>g</AutoScalingGroupName><Cause>c</Cause><Description>Launching a new EC2 instance</Description>
<StartTime>{now}</StartTime><StatusCode>Failed</StatusCode><StatusMessage>{why}</StatusMessage></member></Activities>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"""


def shown(done: CompletedProcess[str]) -> dict[str, str]:
    """The screen's lines by their titles; several of one title as one text. The alarms' states began N minutes ago."""
    texts: dict[str, str] = {}
    title = ""
    for line in re.sub(r"for \d+ min\b", "for N min", done.stdout).splitlines()[1:]:
        title = line[2:10].strip() or title
        texts[title] = f"{texts[title]}; {line[11:]}" if title in texts else line[11:]
    return texts


def test_status_is_one_screen(stack: Laptop) -> None:
    stack.head.add_worker(used=1.0)
    stack.head.add_worker()
    stack.head.jobs = ["RUNNING", "PENDING", "SUCCEEDED"]
    stack.head.waiting = [({"GPU": 1.0}, 3)]
    stack.put_alarm("idle", "OK")
    done = stack.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "stack outputs in us-east-1"
    assert shown(done) == {
        "head": f"m5.xlarge in us-east-1a, Ray {stack.head.version}, up 1 h 50 min",
        "workers": "2 x g5.xlarge on demand in us-east-1a: 1 of 2 GPUs in use",
        "GPUs": "1 of 2 in use, 4 requested",
        "jobs": "1 running, 1 queued",
        "ECS": "head 1 of 1 running, workers 2 of 2 running",
        "EC2": "2 of 2 workers in service",
        "cost": "2.20 USD an hour now; at most 2.20 with all GPU and CPU workers; 140 USD a month while idle; disks, "
        "NAT and traffic are extra",
        "scale-in": "idle workers stop after 30 minutes (alarm OK for N min)",
    }


def test_status_as_json(stack: Laptop) -> None:
    stack.head.add_worker(**{"ray.io/market-type": "spot"})
    document = json.loads(stack.run("status", "--json").stdout)
    assert document["gpus"] == {"used": 0, "total": 1, "requested": 0}
    assert document["services"]["workers"] == {"running": 2, "desired": 2, "fault": None}
    assert document["hourly_usd"]["workers"] == pytest.approx(SPOT_USD + 1.006, abs=1e-4)
    assert document["hourly_usd"]["now"] == pytest.approx(SPOT_USD + 1.006 + 0.192, abs=1e-4)
    assert document["unknown"] == {}


def test_idle_workers_show_their_stop_time(stack: Laptop) -> None:
    stack.head.add_worker()
    stack.put_alarm("idle", "OK")
    assert shown(stack.run("status"))["scale-in"] == "idle workers stop after 30 minutes (alarm OK for N min)"
    stack.put_workers(scaling=MINIMUM)
    stack.put_alarm("idle", "ALARM")
    assert shown(stack.run("status"))["scale-in"] == (
        "idle workers stop after 60 minutes, down to 1 (alarm active for N min; scaling in); "
        "the last worker keeps running; pulumi config set minWorkers 0 and pulumi up let the scale-in stop all"
    )


def test_permanent_cpu_workers_name_their_config_key(stack: Laptop) -> None:
    stack.put_workers(scaling={**NEVER, "cpu-workers": {"min": 1, "max": 2, "idle_minutes": 60}})
    assert "pulumi config set minCpuWorkers 0 and pulumi up" in shown(stack.run("status"))["scale-in"]


def test_workers_without_idle_time_show_their_cost(stack: Laptop) -> None:
    stack.put_workers(scaling=NEVER)
    stack.head.add_worker()
    stack.head.add_worker()
    assert shown(stack.run("status"))["scale-in"] == (
        "idle workers keep running (2.01 USD an hour); pulumi config set idleTimeoutMinutes 30 and pulumi up stop them"
    )


def test_missing_alarm_stops_nothing(stack: Laptop) -> None:
    assert "(but its alarm is missing; pulumi up creates it)" in shown(stack.run("status"))["scale-in"]


def test_failed_launch_is_one_line(stack: Laptop) -> None:
    now = datetime.now(UTC).isoformat()
    stack.front.texts["DescribeScalingActivities"] = FAILED.format(now=now, why=NO_CAPACITY)
    assert shown(stack.run("status"))["EC2"] == f"2 of 2 workers in service; the last launch failed: {NO_CAPACITY}"


def test_denied_aws_values_are_omitted(stack: Laptop) -> None:
    stack.front.refused = {"DescribeServices", "DescribeAutoScalingGroups", "DescribeInstances"}
    done = stack.run("status")
    assert done.returncode == 0, done.stderr
    found = shown(done)
    assert re.fullmatch(r"unknown \(ecs: An error occurred \(AccessDeniedException\).*\)", found["ECS"])
    assert found["EC2"].startswith("unknown (autoscaling: ")
    assert re.match(r"unknown \(ec2: .*\), Ray ", found["head"])
    assert found["cost"].startswith("0.19 USD an hour now")


def test_costs_are_unknown_without_a_price(stack: Laptop) -> None:
    stack.put_workers(head_usd=None)
    assert shown(stack.run("status"))["cost"].startswith("unknown (the stack has no price of a node); at most 2.20")


def test_parameter_of_another_version_is_reported(stack: Laptop) -> None:
    stack.put_workers(scaling=...)
    found = shown(stack.run("status"))
    why = f"unknown ({stack.outputs['cluster_info_parameter']} has no valid cluster info; pulumi up writes it)"
    assert found["scale-in"] == why
    assert found["cost"].startswith(f"{why}; at most 2.20")


def test_aws_state_is_shown_without_a_head(stack: Laptop) -> None:
    stack.replace_service("head", 0)
    done = stack.run("status", AWS_STAND_IN_REFUSES="TargetNotConnected")
    assert done.returncode == 3
    assert shown(done)["ECS"] == "head 0 of 1 running, workers 2 of 2 running"
    assert "GPUs" not in shown(done)
    [line] = done.stderr.splitlines()
    assert line.startswith("ray-on-ecs: the head's instance is not connected to Session Manager")


def test_head_replacement_is_reported(stack: Laptop) -> None:
    stack.replace_service("head", 0)
    done = stack.run("status", AWS_STAND_IN_HOSTS=json.dumps({stack.outputs["head_host"]: "127.0.0.1:9"}))
    assert done.returncode == 3
    assert done.stderr.startswith("ray-on-ecs: the head's task is not running: it is starting or being replaced")


def test_stack_that_is_down_is_one_line(stack: Laptop) -> None:
    stack.delete_token()
    stack.outputs["services"] = {}
    done = stack.run_process("status")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("ray-on-ecs: stack outputs is down, or in another account: its resources are not")


def test_wrong_token_is_one_line(stack: Laptop) -> None:
    stack.put_token("of-another")
    done = stack.run("status")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ray-on-ecs: the Ray head refuses the token; ")


def test_invalid_outputs_file_is_refused(stack: Laptop) -> None:
    done = stack.run_alone("status", "--outputs", "nowhere.json")
    assert done.returncode == 2
    assert "--outputs: nowhere.json can't be read" in done.stderr
    stack.outputs = {}
    done = stack.run("status")
    assert done.returncode == 3
    assert done.stderr.endswith("is not up; pulumi up creates it\n")


def test_missing_pulumi_and_file_have_a_hint(stack: Laptop) -> None:
    done = stack.run_alone("status")
    assert done.returncode == 2
    assert done.stderr.startswith("ray-on-ecs: command not found: pulumi; install Pulumi, or give the stack's outputs")


def test_failed_deployment_is_named(stack: Laptop) -> None:
    stack.fail_deployment("workers", "tasks failed to start.")
    assert "workers: the last deployment failed: tasks failed to start; pulumi" in shown(stack.run("status"))["ECS"]


def test_task_with_a_failed_gpu_is_named(stack: Laptop) -> None:
    stack.replace_service("workers", 1)
    stack.stop_task({"containers": [{"exitCode": 4}]})
    assert "workers: the last task stopped because a GPU is missing" in shown(stack.run("status"))["ECS"]


def test_unhealthy_instance_is_named(stack: Laptop) -> None:
    instance_id = stack.mark_unhealthy()
    assert f"; unhealthy, being replaced: {instance_id}" in shown(stack.run("status"))["EC2"]


@pytest.mark.parametrize(
    ("workers", "monthly"),
    [
        ({}, 140),
        (MINIMUM, 140 + 734),
        (NEVER, 140 + 2 * 734),
        ({"cpu-workers": {"min": 1, "max": 2, "idle_minutes": 60}}, None),
    ],
)
def test_cost_of_an_idle_stack(stack: Laptop, workers: dict[str, object], monthly: float | None) -> None:
    stack.put_workers(scaling={"workers": {"min": 0, "max": 2, "idle_minutes": 30}, **workers})
    found = json.loads(stack.run("status", "--json").stdout)
    assert found["idle_monthly_usd"] == (pytest.approx(monthly, abs=1) if monthly else None)
