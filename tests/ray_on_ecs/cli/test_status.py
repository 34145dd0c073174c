"""`ray-on-ecs status` of a stack: the state of Ray and AWS, without values that AWS refuses."""

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from subprocess import CompletedProcess
from typing import Any

import pytest

from ray_on_ecs.cluster import aws
from tests.ec2_reservations import BLOCK_ID, answer
from tests.ray_on_ecs.cli.account import Laptop, group_name

SPOT_USD = 0.00001  # moto's price of all types
IDLE = {"head": 0.192, "its disk": 0.012, "NAT gateway": 0.05, "CloudWatch": 0.02}
IDLE_USD = sum(IDLE.values())
AT_LEAST = "at least 0.27 USD an hour (200 a month) without workers"


def shown(done: CompletedProcess[str]) -> dict[str, str]:
    """The screen's lines by their titles; several of one title as one text."""
    lines = done.stdout.splitlines()[1:]
    width = max(8, *(len(line.split(maxsplit=1)[0]) for line in lines if line[2] != " "))
    texts: dict[str, str] = {}
    title = ""
    for line in lines:
        title, text = line[2 : 2 + width].strip() or title, line[3 + width :]
        texts[title] = f"{texts[title]}; {text}" if title in texts else text
    return texts


def test_status_is_one_screen(stack: Laptop) -> None:
    stack.head.add_worker(used=1.0)
    stack.head.add_worker()
    stack.head.jobs = ["RUNNING", "PENDING", "SUCCEEDED"]
    stack.head.waiting = [({"GPU": 1.0}, 3)]
    done = stack.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "stack outputs in us-east-1"
    rows = shown(done)
    assert re.fullmatch(rf"Ray {stack.head.version}, up 1:5\d:\d\d, 0 of 2 CPUs in use", rows["head"])
    assert rows == {
        "head": rows["head"],
        "default": "2 of 2 nodes in us-east-1a: 2 x g5.xlarge on demand, 1 of 2 GPUs in use",
        "GPUs": "1 of 2 in use, 4 requested",
        "jobs": "1 running, 1 queued",
        "ECS": "head 1 of 1 running, workers 2 of 2 running",
        "EC2": "2 of 2 workers in service",
        "cost": "2.29 USD an hour (1,669 a month) now: head 0.19, its disk 0.01, NAT gateway 0.05, CloudWatch 0.02, "
        "workers 2.01; at most 2.29 an hour with all workers; disk space of workers, traffic, S3 and logs are extra; "
        "`pulumi destroy` ends it",
        "scale-in": "idle workers stop after 30 minutes",
    }


def test_status_as_json(stack: Laptop) -> None:
    stack.head.add_worker(**{"ray.io/market-type": "spot"})
    document = json.loads(stack.run("status", "--json").stdout)
    assert document["gpus"] == {"used": 0, "total": 1, "requested": 0}
    assert document["services"]["workers"] == {"running": 2, "desired": 2, "fault": None, "deployment": None}
    assert document["hourly_usd"] == pytest.approx(SPOT_USD + 1.006 + IDLE_USD, abs=1e-4)
    assert document["monthly_usd"] == pytest.approx(730 * document["hourly_usd"], abs=0.1)
    assert document["hourly_usd_by_part"] == {**IDLE, "workers": pytest.approx(SPOT_USD + 1.006)}
    assert {"pool": "default", "max": 2, "idle_minutes": 30}.items() <= document["node_groups"]["workers"].items()
    assert document["unknown"] == {}


def test_failed_launch_is_one_line(stack: Laptop) -> None:
    stack.fail_launch()
    rows = shown(stack.run("status"))
    assert rows["EC2"] == "1 of 2 workers in service"
    assert "; workers: EC2 has only 1 of 2 g5.xlarge in us-east-1a at the moment; add zones" in rows["ECS"]
    stack.fail_launch(minutes_ago=24 * 60)
    assert "EC2 has" not in shown(stack.run("status"))["ECS"]


def cause(done: CompletedProcess[str]) -> str:
    """The cause that a command prints for the workers, in doctor's line of the services."""
    return re.sub("(?s).*  services: ", "", done.stdout).partition("workers: ")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda stack: stack.fail_launch(), "EC2 has only 1 of 2 g5.xlarge in us-east-1a at the moment; add zones"),
        (
            lambda stack: stack.fail_launch("Cancelled", "Termination Reason: Client.InternalError: Client error"),
            "EC2 starts no g5.xlarge: Auto Scaling may not use the KMS key of the disk; set it as kmsKeyArn",
        ),
        (lambda stack: stack.put_group("InService", suspended="Launch"), "Auto Scaling starts no instance, as its"),
        (
            lambda stack: stack.put_group("InService", "Standby"),
            "a person has put 1 instance of the group into Standby",
        ),
    ],
    ids=["capacity", "ended at once", "suspended", "standby"],
)
def test_status_and_doctor_say_the_same_cause(stack: Laptop, fault: Callable[[Laptop], None], says: str) -> None:
    fault(stack)
    status, doctor = cause(stack.run("status")), cause(stack.run("doctor"))
    assert status.startswith(says)
    assert doctor == status


@pytest.mark.parametrize("operation", ["DescribeScalingActivities", "DescribeTasks", "ListTasks"])
def test_denied_call_is_named_beside_the_cause(stack: Laptop, operation: str) -> None:
    stack.fail_launch()
    stack.front.texts.pop("DescribeScalingActivities")
    stack.replace_service("workers", 1)
    stack.stop_task({"stoppedReason": "Task failed to start", "containers": [{"exitCode": 127}]})
    stack.front.refused = {operation}
    line = cause(stack.run("status"))
    service = "autoscaling" if "Scaling" in operation else "ecs"
    assert line.endswith(f"AWS does not tell more: {service}:{operation} is denied")
    assert line.startswith("the last task stopped: the image lacks its command") is (service == "autoscaling")


def test_deployment_that_waits_for_a_run_is_named(stack: Laptop) -> None:
    stack.put_alarm("workers", "ALARM")
    assert shown(stack.run("status"))["scale-in"].startswith("scaling in workers since ")
    begun = datetime(2026, 2, 28, 11, 58, tzinfo=UTC).timestamp()
    new = {"status": "PRIMARY", "rolloutState": "IN_PROGRESS", "createdAt": begun, "runningCount": 1}
    stack.put_deployments("workers", new, {"status": "ACTIVE", "rolloutState": "COMPLETED", "runningCount": 1})
    stack.head.add_worker(used=1.0)
    stack.head.add_worker()
    line = (
        "idle workers keep running: a deployment is in progress since 2026-02-28 11:58 UTC: it waits for the runs on 1 "
        "task of the earlier version, which are protected; ECS does not scale in before its end; 1 idle worker costs "
        "1.01 USD an hour meanwhile"
    )
    assert shown(stack.run("status"))["scale-in"] == line
    doctor = stack.run("doctor")
    assert doctor.returncode == 0
    assert f"!   scale-in: {line}\n" in doctor.stdout
    document = json.loads(stack.run("status", "--json").stdout)
    assert document["services"]["workers"]["deployment"] == {"since": "2026-02-28T11:58:00+00:00", "old_tasks": 1}
    assert document["scale_in"]["workers"] == {"line": line, "is_hindered": True, "fix": ""}


def test_suspended_scaling_is_named(stack: Laptop) -> None:
    stack.put_alarm("workers", "ALARM")
    stack.put_target("workers", suspended=True)
    line = shown(stack.run("status"))["scale-in"]
    assert line.startswith("idle workers keep running: its scale-in is suspended in Application Auto Scaling")


@pytest.mark.parametrize("operation", ["DescribeAlarms", "DescribeScalableTargets"])
def test_denied_scale_in_is_named(stack: Laptop, operation: str) -> None:
    stack.front.refused = {operation}
    action = "cloudwatch:DescribeAlarms" if "Alarms" in operation else f"application-autoscaling:{operation}"
    line = f"idle workers stop after 30 minutes (not known: {action} is denied)"
    assert shown(stack.run("status"))["scale-in"] == line


def test_denied_aws_values_are_omitted(stack: Laptop) -> None:
    stack.front.refused = {"DescribeServices", "DescribeAutoScalingGroups"}
    done = stack.run("status")
    assert done.returncode == 0, done.stderr
    rows = shown(done)
    assert re.fullmatch(r"unknown \(ecs: An error occurred \(AccessDeniedException\).*\)", rows["ECS"])
    assert rows["EC2"].startswith("unknown (autoscaling: ")
    assert rows["cost"].startswith("0.27 USD an hour (200 a month) now: head 0.19, ")


def test_costs_are_unknown_without_a_price(stack: Laptop) -> None:
    stack.put_workers(head_usd=None)
    why = "unknown (the stack has no price of a node)"
    assert shown(stack.run("status"))["cost"].startswith(f"{why}; {AT_LEAST}; at most 2.29 an hour")


@pytest.mark.parametrize(
    ("idle", "line"),
    [
        (
            None,
            "2.20 USD an hour (1,609 a month) now: head 0.19, workers 2.01; at most 2.20 an hour with all workers; "
            "network, CloudWatch, disk space, traffic, S3 and logs are extra; `pulumi destroy` ends it",
        ),
        (
            IDLE | {"NAT gateway": None},
            "2.24 USD an hour (1,632 a month) now: head 0.19, its disk 0.01, CloudWatch 0.02, workers 2.01; at most "
            "2.24 an hour with all workers; NAT gateway, disk space of workers, traffic, S3 and logs are extra; "
            "`pulumi destroy` ends it",
        ),
        (
            IDLE | {"image": 0.000452},
            "2.29 USD an hour (1,669 a month) now: head 0.19, its disk 0.01, NAT gateway 0.05, CloudWatch 0.02, "
            "workers 2.01; at most 2.29 an hour with all workers; disk space of workers, traffic, S3 and logs are "
            "extra; `pulumi destroy` ends it",
        ),
    ],
    ids=["outputs of an earlier version", "a price is unknown", "less than half a cent"],
)
def test_cost_without_a_part_says_so(stack: Laptop, idle: dict[str, float | None] | None, line: str) -> None:
    if idle is None:
        del stack.outputs["idle_hourly_usd"]
    else:
        stack.outputs["idle_hourly_usd"] = idle
    assert shown(stack.run("status"))["cost"] == line


def test_stack_costs_while_its_head_cannot_be_reached(stack: Laptop) -> None:
    done = stack.run("status", with_state=False)
    assert shown(done)["cost"].startswith(f"unknown while the head can't be reached; {AT_LEAST}; at most 2.29 an hour")


def test_parameter_of_another_version_is_reported(stack: Laptop) -> None:
    stack.put_workers(network_gbits=...)
    rows = shown(stack.run("status"))
    why = f"unknown ({stack.outputs['cluster_info_parameter']} has no valid cluster info; pulumi up writes it)"
    assert rows["scale-in"] == why
    assert rows["cost"].startswith(f"{why}; {AT_LEAST}; at most 2.29 an hour")


def test_aws_state_is_shown_without_a_head(stack: Laptop) -> None:
    stack.replace_service("head", 0)
    stack.head.is_up = False
    done = stack.run("status")
    assert done.returncode == 3
    assert shown(done)["ECS"] == ("head 0 of 1 running, workers 2 of 2 running; head: AWS gives no reason yet")
    assert "GPUs" not in shown(done)
    [line] = done.stderr.splitlines()
    assert line.startswith("ray-on-ecs: the head's task is not running: it is starting or being replaced")


@pytest.mark.parametrize(("seconds", "says"), [(34, None), (240, "silent: this is its state of 0:04:0")])
def test_state_of_a_silent_head_has_its_age(stack: Laptop, seconds: float, says: str | None) -> None:
    stack.head.silent_seconds = seconds
    stack.head.add_worker(used=1.0)
    done = stack.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    rows = shown(done)
    assert rows["GPUs"] == "1 of 1 in use, 1 requested"
    assert ("silent" in done.stdout) is bool(says)
    assert says is None or rows["head"].startswith(says)
    assert json.loads(stack.run("status", "--json").stdout)["seconds_ago"] == pytest.approx(seconds, abs=30)


def test_ray_that_is_starting_is_named(stack: Laptop) -> None:
    stack.head.has_ray = False
    rows = shown(stack.run("status"))
    assert rows["Ray"] == "does not answer the head: it is starting, or busy"
    assert rows["jobs"] == "0 running, 0 queued"


def test_stack_that_is_down_is_one_line(stack: Laptop) -> None:
    stack.delete_token()
    stack.outputs["services"] = {}
    done = stack.run_process("status")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("ray-on-ecs: stack outputs is down, or in another account: its resources are not")


@pytest.mark.parametrize(
    ("nodes", "changed", "hourly"),
    [
        ([], {}, IDLE_USD + 2 * 1.006),
        ([{}], {}, IDLE_USD + 2 * 1.006),
        ([{}, {}, {}], {}, IDLE_USD + 3 * 1.006),
        ([{"ray.io/market-type": "spot"}] * 2, {}, IDLE_USD + 2 * SPOT_USD),
        ([], {"groups": {"workers": {"spot": True}}}, IDLE_USD + 2 * SPOT_USD),
        (
            [{"instance-type": "g5.2xlarge"}] * 2,
            {"prices": {"g5.xlarge": 1.006, "g5.2xlarge": 1.212}},
            IDLE_USD + 2.424,
        ),
        ([{"ray.io/node-group": "cpu-workers", "instance-type": "c7i.large"}], {"prices": {"c7i.large": 0.1}}, None),
        (
            [{"ray.io/node-group": "cpu-workers", "instance-type": "c7i.large"}],
            {"prices": {"g5.xlarge": 1.006, "c7i.large": 0.1}},
            IDLE_USD + 2 * 1.006 + 0.1,
        ),
        ([{"instance-type": "g6.xlarge"}], {}, None),
        ([], {"prices": None}, None),
        ([], {"head_usd": None}, None),
    ],
)
def test_cost_per_hour(
    stack: Laptop, nodes: list[dict[str, Any]], changed: dict[str, Any], hourly: float | None
) -> None:
    """Two instances of workers run; those without a node are starting."""
    stack.put_workers(**changed)
    for labels in nodes:
        stack.head.add_worker(**labels)
    document = json.loads(stack.run("status", "--json").stdout)
    assert document["hourly_usd"] == (pytest.approx(hourly, abs=1e-4) if hourly else None)
    assert (document["unknown"] == {}) is (hourly is not None)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            {"exitCode": 137, "reason": "OutOfMemoryError: Container killed"},
            "exit status 137, OutOfMemoryError: Contai",
        ),
        ({"exitCode": 2}, "Essential container in task exited, exit status 2"),
        ({"reason": "CannotPullContainerError: not found"}, "task exited, CannotPullContainerError: not found"),
        ({"exitCode": 0}, "Essential container in task exited"),
    ],
)
def test_reason_of_a_container_explains_the_head(stack: Laptop, task: dict[str, object], says: str) -> None:
    stack.replace_service("head", 0)
    stack.stop_task({"stoppedReason": "Essential container in task exited", "containers": [task]})
    stack.head.is_up = False
    done = stack.run("status")
    assert done.returncode == 3
    assert says in done.stderr
    assert says in shown(done)["ECS"]


HTML = b"<!DOCTYPE html><html><title>Blocked</title><body>Your organization blocks this site<br></body></html>"
JSON = {"Content-Type": "application/x-amz-json-1.1"}
PAGES: dict[str, tuple[int, dict[str, str], bytes]] = {
    "a page": (200, {}, HTML),
    "a refusal as a page": (403, {}, HTML),
    "a page as JSON": (200, JSON, HTML),
    "nothing": (200, {}, b""),
    "an empty document": (200, JSON, b"{}"),
    "null": (200, JSON, b"null"),
    "a list": (200, JSON, b"[]"),
    "a number": (200, JSON, b"7"),
    "a text": (200, JSON, b'"login"'),
    "another document": (200, JSON, b'{"error": "login", "Parameter": "x", "services": "x"}'),
    "empty parts": (200, JSON, b'{"Parameter": {}, "services": [{}], "taskArns": ["x"], "tasks": [{}]}'),
    "half a document": (200, JSON, b'{"Parameter": {"Value": "'),
    "other XML": (200, {"Content-Type": "text/xml"}, b"<rss><channel/></rss>"),
    "half a page": (200, {"Content-Type": "text/xml"}, HTML[:30]),
    "a login": (302, {"Location": "http://127.0.0.1:9/login"}, b""),
    "a proxy's login": (407, {"Proxy-Authenticate": "Basic"}, HTML),
    "a portal": (511, {}, HTML),
    "not text": (200, JSON, b"\xff\xfe\x00"),
}
OPERATIONS = (
    *("GetCallerIdentity", "GetParameter", "DescribeServices", "ListTasks", "DescribeTasks"),
    *("DescribeAutoScalingGroups", "DescribeScalingActivities", "DescribeSpotPriceHistory", "DescribeAlarms"),
    *("DescribeInstanceInformation", "DescribeScalableTargets", "ListContainerInstances"),
)


@pytest.mark.parametrize("page", PAGES)
def test_answer_of_another_program_is_one_line(stack: Laptop, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    stack.front.page = PAGES[page]
    status, doctor = stack.run("status"), stack.run("doctor")
    assert (status.returncode, doctor.returncode) == (3, 1), status.stderr + doctor.stdout
    assert len(status.stderr.splitlines()) == 1
    assert "✗   credentials: " in doctor.stdout
    assert doctor.stderr == ""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_single_answer_of_another_program_hides_only_its_values(
    stack: Laptop, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    stack.put_workers({"workers": {"spot": True}})
    stack.replace_service("workers", 1)
    stack.stop_task({"stoppedReason": "Essential container in task exited"})
    stack.front.replaced = {operation}
    of_connection = operation in ("GetParameter", "ListTasks", "DescribeTasks")
    stack.front.page = PAGES["a page"]
    status = stack.run("status")
    assert status.returncode == 0 or (status.returncode == 3 and of_connection), status.stderr
    assert "  EC2 " in status.stdout
    for page in ("a page", "empty parts"):
        stack.front.page = PAGES[page]
        assert stack.run("doctor").stderr == ""


H100: Any = {
    "ray.io/node-group": "h100",
    "instance-type": "p5.48xlarge",
    "ray.io/availability-zone": "us-east-1c",
    "ray.io/market-type": "spot",
}


def test_pools_have_a_line_for_each_node_group(stack: Laptop) -> None:
    stack.put_pools()
    stack.head.add_worker(used=1.0)
    stack.head.add_worker(**{"ray.io/availability-zone": "us-east-1b"})
    stack.head.add_worker(used=4.0, gpus=8.0, **H100)
    done = stack.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    rows = shown(done)
    usd = IDLE_USD + 3 * 1.006 + SPOT_USD
    del rows["head"], rows["jobs"]
    assert rows == {
        "default": "1 of 2 nodes in us-east-1a: 1 x g5.xlarge on demand, 1 of 1 GPUs in use; "
        "1 of 2 nodes in us-east-1b: 1 x g5.xlarge on demand, 0 of 1 GPUs in use",
        "h100": "1 of 2 nodes in us-east-1c: 1 x p5.48xlarge on spot, 4 of 8 GPUs in use",
        "GPUs": "5 of 10 in use, 5 requested",
        "ECS": "head 1 of 1 running, workers 2 of 2 running, h100-workers 1 of 1 running",
        "EC2": "2 of 2 workers in service; 1 of 1 h100-worker in service",
        "cost": f"{usd:.2f} USD an hour ({usd * 730:,.0f} a month) now: head 0.19, its disk 0.01, NAT gateway 0.05, "
        "CloudWatch 0.02, workers 2.01, workers-b 1.01, h100-workers 0.00; at most 2.29 an hour with all workers; disk "
        "space of workers, traffic, S3 and logs are extra; `pulumi destroy` ends it",
        "scale-in": "idle workers, workers-b and h100-workers stop after 30 minutes",
    }


def test_pool_without_nodes_says_what_it_would_start(stack: Laptop) -> None:
    spread = {"zones": ["us-east-1c", "us-east-1d"], "types": ["p5.48xlarge", "p5en.48xlarge"], "gpu": "H100 or H200"}
    cpu = {"pool": "prep", "types": ["c7i.large"], "gpu": "", "units": 2, "max": 1}
    stack.put_pools({"h100-workers": spread, "prep-workers": cpu, "workers-b": {"max": 0}})
    rows = shown(stack.run("status"))
    assert (
        rows["default"] == "0 of 2 nodes in us-east-1a: g5.xlarge (1 x A10G); "
        "0 of 0 nodes in us-east-1b: g5.xlarge (1 x A10G)"
    )
    assert rows["h100"] == "0 of 2 nodes in us-east-1c or us-east-1d: p5.48xlarge or p5en.48xlarge (8 x H100 or H200)"
    assert rows["prep"] == "0 of 1 node in us-east-1c: c7i.large (2 CPUs)"
    assert "no workers-b are configured (maxWorkers is 0)" in rows["scale-in"]


ACCOUNT_ID = "123456789012"  # of moto
ON_DEMAND = {"spot": False, "reservation": {"id": BLOCK_ID, "is_block": False}}
IN_BLOCK = {"spot": False, "reservation": {"id": BLOCK_ID, "is_block": True}}


def test_reservation_is_shown_with_its_unused_cost(stack: Laptop) -> None:
    stack.put_pools({"h100-workers": ON_DEMAND})
    stack.front.texts["DescribeCapacityReservations"] = answer(free=1, owner=ACCOUNT_ID)
    document = json.loads(stack.run("status", "--json").stdout)
    assert document["reservations"] == {
        "h100-workers": f"capacity reservation {BLOCK_ID}, 1 of 2 in use, billed also without instances"
    }
    assert document["hourly_usd_by_part"][f"1 unused of {BLOCK_ID}"] == pytest.approx(55.04)
    assert document["hourly_usd_by_part"]["h100-workers"] == pytest.approx(55.04)
    assert document["unknown"] == {}


def test_unused_instances_of_another_account_cost_nothing(stack: Laptop) -> None:
    stack.put_pools({"h100-workers": ON_DEMAND})
    stack.front.texts["DescribeCapacityReservations"] = answer(free=1, owner="210987654321")
    rows = shown(stack.run("status"))
    assert f"{BLOCK_ID}, 1 of 2 in use, billed to account 210987654321 also without instances" in rows["h100"]
    assert "unused" not in rows["cost"]


def test_block_is_shown_with_its_end_and_without_a_price(stack: Laptop) -> None:
    stack.put_pools({"h100-workers": IN_BLOCK})
    stack.front.texts["DescribeCapacityReservations"] = answer(datetime(2099, 1, 2, 3, 4, tzinfo=UTC), free=1)
    rows = shown(stack.run("status"))
    line = f"Capacity Block {BLOCK_ID} until 2099-01-02 03:04 UTC, 1 of 2 in use, paid up front"
    assert rows["h100"] == f"0 of 2 nodes in us-east-1c: p5.48xlarge (8 x H100); {line}"
    assert "h100-workers 0.00" in rows["cost"]
    assert "unused" not in rows["cost"]


def test_reservation_that_ec2_does_not_describe_has_its_reason(stack: Laptop) -> None:
    stack.put_pools({"h100-workers": ON_DEMAND})
    stack.front.refused.add("DescribeCapacityReservations")
    rows = shown(stack.run("status"))
    assert f"; capacity reservation {BLOCK_ID} (" in rows["h100"]
    assert "USD an hour" in rows["cost"]


def test_zones_of_a_pool_are_together(stack: Laptop) -> None:
    cpu = {"pool": "cpu", "zones": ["us-east-1a"], "types": ["c7i.large"], "gpu": "", "units": 4, "max": 1}
    stack.put_pools({"cpu-workers": cpu})
    stack.head.add_worker(gpus=0.0, **{"ray.io/node-group": "cpu-workers", "instance-type": "c7i.large"})
    done = stack.run("status")
    rows = shown(done)
    assert re.findall("^  (default|cpu|h100)", done.stdout, re.MULTILINE) == ["default", "h100", "cpu"]
    assert rows["default"].count("0 of 2 nodes") == 2
    assert rows["cpu"] == "1 of 1 node in us-east-1a: 1 x c7i.large on demand, 0 of 4 CPUs in use"


def test_pools_as_json(stack: Laptop) -> None:
    stack.put_pools()
    document = json.loads(stack.run("status", "--json").stdout)
    kinds = ["workers", "workers-b", "h100-workers"]
    assert [*document["services"]] == ["head", *kinds]
    assert [*document["groups"]] == [*document["node_groups"]] == [*document["scale_in"]] == kinds
    assert [group["pool"] for group in document["node_groups"].values()] == ["default", "default", "h100"]
    assert document["groups"]["h100-workers"]["types"] == ["p5.48xlarge"]
    usd = {**IDLE, "workers": 2.012, "h100-workers": 55.04}
    assert document["hourly_usd_by_part"] == pytest.approx(usd), "instances that have not joined are billed"
    assert document["hourly_usd"] == pytest.approx(sum(usd.values()))
    assert document["unknown"] == {}


def test_one_question_asks_for_all_pools(stack: Laptop) -> None:
    more = {f"p{number}-workers": {"pool": f"p{number}", "group": "absent"} for number in range(12)}
    stack.put_pools(more)
    stack.head.add_worker(**H100)
    stack.front.asked.clear()
    document = json.loads(stack.run("status", "--json").stdout)
    assert [*document["services"]] == ["head", "workers", "workers-b", "h100-workers"], "the others are not in ECS"
    operations = Counter(operation for operation, _ in stack.front.asked)
    once = ("DescribeAutoScalingGroups", "DescribeSpotPriceHistory", "DescribeAlarms", "DescribeScalableTargets")
    assert {name: operations[name] for name in once} == dict.fromkeys(once, 1)
    assert operations["DescribeServices"] == 2, "ECS takes ten at a time"


def test_missing_group_is_named(stack: Laptop) -> None:
    stack.put_pools({"h100-workers": {"group": "another"}})
    missing = "the Auto Scaling group of h100-workers is missing; pulumi up creates it"
    assert shown(stack.run("status"))["EC2"] == f"2 of 2 workers in service; {missing}"
    doctor = stack.run("doctor")
    assert doctor.returncode == 1
    assert missing in doctor.stdout
    assert json.loads(stack.run("status", "--json").stdout)["groups"]["h100-workers"] is None


def test_fault_of_a_pool_is_said_of_its_kind(stack: Laptop) -> None:
    stack.put_pools()
    stack.replace_service("h100-workers", 0)
    stack.stop_task({"containers": [{"exitCode": 4}]})
    rows = shown(stack.run("status"))
    assert "; h100-workers: the last task stopped: a GPU is missing" in rows["ECS"]
    assert "; workers:" not in rows["ECS"]
    doctor = stack.run("doctor")
    assert "h100-workers: the last task stopped: a GPU is missing" in doctor.stdout


def test_suspended_group_hinders_its_own_kind(stack: Laptop) -> None:
    stack.put_pools()
    autoscaling = stack.aws("autoscaling")
    which = {"AutoScalingGroupName": group_name("h100-workers"), "ScalingProcesses": ["Terminate"]}
    autoscaling.suspend_processes(**which)
    stack.undo.callback(autoscaling.resume_processes, **which)
    document = json.loads(stack.run("status", "--json").stdout)
    assert [kind for kind, state in document["scale_in"].items() if state["is_hindered"]] == ["h100-workers"]
    assert group_name("h100-workers") in document["scale_in"]["h100-workers"]["fix"]
    rows = shown(stack.run("status"))
    assert rows["EC2"] == "2 of 2 workers in service; 1 of 1 h100-worker in service; suspended: Terminate"
    assert rows["scale-in"].startswith("idle workers and workers-b stop after 30 minutes; idle h100-workers keep run")
    assert "!   workers: " in stack.run("doctor").stdout


def test_deployment_of_a_pool_keeps_its_idle_nodes(stack: Laptop) -> None:
    stack.put_pools()
    begun = datetime(2026, 2, 28, 11, 58, tzinfo=UTC).timestamp()
    new = {"status": "PRIMARY", "rolloutState": "IN_PROGRESS", "createdAt": begun, "runningCount": 1}
    stack.put_deployments("h100-workers", new)
    stack.head.add_worker(gpus=8.0, **H100 | {"ray.io/market-type": "on-demand"})
    line = shown(stack.run("status"))["scale-in"]
    assert line.startswith(
        "idle workers and workers-b stop after 30 minutes; idle h100-workers keep running: a deploym"
    )
    assert line.endswith("1 idle h100-worker costs 55.04 USD an hour meanwhile")


@pytest.mark.parametrize("operation", ["DescribeAutoScalingGroups", "DescribeServices", "DescribeSpotPriceHistory"])
def test_denied_question_hides_its_part_of_all_pools(stack: Laptop, operation: str) -> None:
    stack.put_pools({"h100-workers": {"spot": True}})
    stack.front.refused = {operation}
    done = stack.run("status")
    assert done.returncode == 0, done.stderr
    hidden = {"DescribeAutoScalingGroups": "EC2", "DescribeServices": "ECS", "DescribeSpotPriceHistory": "cost"}
    rows = shown(done)
    unknown = {title for title, text in rows.items() if text.startswith("unknown (")}
    assert unknown == {hidden[operation]}
    assert {"default", "h100", "scale-in"} <= rows.keys()
    assert stack.run("doctor").stderr == ""


def test_pools_of_a_bucket_are_those_of_the_heads_state(stack: Laptop) -> None:
    stack.put_pools()
    stack.head.add_worker(used=4.0, gpus=8.0, **H100)
    stack.put_state()
    address = f"s3://{stack.outputs['bucket']}"
    done = stack.run_alone("status", RAY_ON_ECS_CLUSTER=address)
    assert (done.returncode, done.stderr) == (0, "")
    rows = shown(done)
    assert rows["h100"] == "1 of 2 nodes in us-east-1c: 1 x p5.48xlarge on spot, 4 of 8 GPUs in use"
    assert rows["default"].startswith("0 of 2 nodes in us-east-1a: g5.xlarge (1 x A10G); 0 of 2 nodes in us-east-1b: ")
    assert "EC2" not in rows


def test_node_of_a_removed_pool_is_still_shown(stack: Laptop) -> None:
    stack.put_pools()
    stack.head.add_worker(gpus=8.0, **H100 | {"ray.io/node-group": "old"})
    rows = shown(stack.run("status"))
    assert rows["old"] == "1 node in us-east-1c: 1 x p5.48xlarge on spot, 0 of 8 GPUs in use"
    assert rows["cost"].startswith(f"unknown (the stack has no price of a node); {AT_LEAST}")
