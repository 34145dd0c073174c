"""A stack in the AWS of the tests, without Pulumi: the resources that the commands query, and its Ray head.

AWS is moto's, behind a server that answers operations unknown to moto, and refuses operations that a test names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest import mock

from ray_on_ecs.node import code
from tests.aws import REGION, client, environment
from tests.serving import serving

BIN = Path(__file__).with_name("bin")
REPOSITORY = Path(__file__).parents[3]
TOKEN = "of-the-stack"
HEAD_HOST = "head.ray.internal"
NUMBERS = count()
# One of the images that moto knows.
IMAGE = "ami-12c6146b"
SECONDS = 120

QUOTA = {"Quota": {"QuotaName": "Running On-Demand G and VT instances", "Value": 64.0}}
ONLINE = {"InstanceInformationList": [{"InstanceId": "i-1", "PingStatus": "Online"}]}
NO_CAPACITY = "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested."


class Front(ThreadingHTTPServer):
    """A server in front of moto's.

    Attributes:
        answers: The JSON answers to operations unknown to moto.
        texts: The XML answers.
        refused: Operations that are answered with AccessDenied; of S3, such as "PUT /bucket".
        is_silent: True if it answers only HEAD.
    """

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.behind = urllib.parse.urlparse(url).netloc
        self.answers: dict[str, Any] = {"DescribeInstanceInformation": ONLINE, "GetServiceQuota": QUOTA}
        self.texts: dict[str, str] = {}
        self.refused: set[str] = set()
        self.is_silent = False

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client may disconnect before it has the answer."""


class Forward(BaseHTTPRequestHandler):
    """Answers directly, or passes requests on to moto."""

    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        front = cast(Front, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation = self._operation(body)
        while front.is_silent and self.command != "HEAD":
            time.sleep(0.1)
        if any(operation.startswith(refused) for refused in front.refused):
            self._refuse(operation)
        elif operation in front.answers:
            self._answer(200, "application/x-amz-json-1.1", json.dumps(front.answers[operation]).encode())
        elif operation in front.texts:
            self._answer(200, "text/xml", front.texts[operation].encode())
        else:
            self._forward(front.behind, body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_one

    def _operation(self, body: bytes) -> str:
        if target := self.headers.get("X-Amz-Target"):
            return target.rpartition(".")[2]
        if "/operation/" in self.path:
            return self.path.rpartition("/")[2]
        action = urllib.parse.parse_qs(body.decode(errors="replace")).get("Action")
        return action[0] if action else f"{self.command} {self.path}"

    def _refuse(self, operation: str) -> None:
        if self.headers.get("X-Amz-Target") or "/operation/" in self.path:
            refusal = json.dumps({"__type": "AccessDeniedException", "message": f"may not {operation}"})
            return self._answer(400, "application/x-amz-json-1.1", refusal.encode())
        error = f"<Error><Code>AccessDenied</Code><Message>may not {operation}</Message></Error>"
        text = error if " " in operation else f"<ErrorResponse>{error}</ErrorResponse>"
        return self._answer(403, "text/xml", text.encode())

    def _forward(self, behind: str, body: bytes) -> None:
        connection = HTTPConnection(behind, timeout=SECONDS)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        kept = {"content-type", "date", "etag", "last-modified", "x-amzn-errortype", "x-amzn-requestid"}
        headers = {name: value for name, value in answer.getheaders() if name.lower() in kept}
        self._answer(answer.status, headers.pop("Content-Type", "text/plain"), answer.read())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class RayHead(ThreadingHTTPServer):
    """The dashboard of a Ray head: the answers of Ray 2.60, for the nodes of a test.

    Attributes:
        nodes: The nodes in the format of the state API.
        usage: Used GPUs by node.
        waiting: The pending shapes, and the number of each.
        jobs: The states of the jobs.
        version: Ray's version.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Dashboard)
        self.nodes = [node("head", {"CPU": 2.0}, {"code": code.fingerprint()}, is_head_node=True)]
        self.usage: dict[str, float] = {}
        self.waiting: list[tuple[dict[str, float], int]] = []
        self.jobs: list[str] = []
        self.version = version("ray")

    def add_worker(self, used: float = 0.0, **labels: str) -> None:
        """Add a node with one GPU."""
        known = {
            "code": code.fingerprint(),
            "instance-type": "g5.xlarge",
            "ray.io/availability-zone": "us-east-1a",
            "ray.io/market-type": "on-demand",
        }
        self.nodes.append(node(f"worker-{len(self.nodes)}", {"CPU": 4.0, "GPU": 1.0}, {**known, **labels}))
        self.usage[self.nodes[-1]["node_id"]] = used

    def answer(self, path: str) -> Any:
        """Return the answer of the dashboard."""
        match path.partition("?")[0]:
            case "/api/version":
                return {"version": "4", "ray_version": self.version, "session_name": "session"}
            case "/api/v0/nodes":
                return {"result": True, "data": {"result": {"total": len(self.nodes), "result": self.nodes}}}
            case "/api/jobs/":
                return [{"type": "SUBMISSION", "status": each} for each in self.jobs]
            case "/api/cluster_status":
                usage = {name: {"GPU": [used, 1.0], "CPU": [0.0, 4.0]} for name, used in self.usage.items()}
                load = {"resourceDemand": self.waiting, "pgDemand": [], "usageByNode": usage}
                return {"data": {"clusterStatus": {"time": 7600.0, "loadMetricsReport": load}}}
        return None


def node(name: str, resources: dict[str, float], labels: dict[str, str], **more: Any) -> dict[str, Any]:
    """A node as Ray's state API has it, started at 1000 s."""
    return {
        "node_id": name,
        "is_head_node": False,
        "state": "ALIVE",
        "state_message": None,
        "resources_total": resources,
        "labels": labels,
        "start_time_ms": 1000_000,
        "end_time_ms": 0,
        **more,
    }


class Dashboard(BaseHTTPRequestHandler):
    """Answers with the head's state, and with 403 to another token."""

    def do_GET(self) -> None:
        found = cast(RayHead, self.server).answer(self.path)
        is_let_in = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.send_response((200 if found is not None else 404) if is_let_in else 403)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@dataclass
class Laptop:
    """A stack in AWS, and a laptop with its outputs in a file, the AWS CLI and its plugin.

    Attributes:
        front: The server that is AWS for the laptop.
        head: The stack's head.
        folder: An empty folder, the working directory of the commands.
        prefix: The stack's name.
        outputs: The stack's outputs.
        variables: The laptop's environment variables.
    """

    front: Front
    head: RayHead
    folder: Path
    prefix: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def aws(self, service: str) -> Any:
        """A client of the AWS behind the refusals."""
        return client(service, f"http://{self.front.behind}")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `ray-on-ecs` with the stack's outputs."""
        file = self.folder / "outputs.json"
        if not file.exists():
            file.write_text(json.dumps(self.outputs))
        return self.run_alone(*arguments, "--outputs", str(file), **variables)

    def run_alone(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `ray-on-ecs`."""
        return subprocess.run(
            [sys.executable, "-m", "ray_on_ecs", *arguments],
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def put_workers(self, **changed: Any) -> None:
        """Write the parameter with the cluster's description."""
        facts = {
            "group": f"{self.prefix}-group",
            "types": ["g5.xlarge"],
            "zones": [{"zone": "us-east-1a", "subnet_id": "subnet-a", "placement_group": None}],
            "spot": False,
            "spread": False,
            "prices": {"g5.xlarge": 1.006},
            "head_usd": 0.192,
            "scaling": {"workers": {"min": 0, "max": 2, "idle_minutes": 30}},
            "gpus": 1,
        }
        document = {key: value for key, value in (facts | changed).items() if value is not ...}
        self.aws("ssm").put_parameter(
            Name=f"{self.prefix}-info", Type="String", Value=json.dumps(document), Overwrite=True
        )

    def put_alarm(self, name: str, state: str) -> None:
        """Make an alarm that changes the number of the workers."""
        cloudwatch, full = self.aws("cloudwatch"), f"{self.outputs['cluster_name']}-workers-{name}"
        cloudwatch.put_metric_alarm(
            AlarmName=full,
            ComparisonOperator="GreaterThanThreshold",
            EvaluationPeriods=10,
            MetricName="GPUs",
            Namespace=self.prefix,
            Period=60,
            Statistic="Maximum",
            Threshold=0,
        )
        cloudwatch.set_alarm_state(AlarmName=full, StateValue=state, StateReason="a test")

    def put_service(self, kind: str, desired: int, of_running: int) -> None:
        """Make a service with this number of running tasks."""
        with mock.patch.dict(os.environ, {"MOTO_ECS_SERVICE_RUNNING": str(of_running)}):
            self.aws("ecs").create_service(
                cluster=self.outputs["cluster_name"],
                serviceName=self.outputs["services"][kind],
                taskDefinition=self.prefix,
                desiredCount=desired,
            )

    def replace_service(self, kind: str, desired: int, of_running: int) -> None:
        """Make the service again."""
        given = {"cluster": self.outputs["cluster_name"], "service": self.outputs["services"][kind]}
        self.aws("ecs").delete_service(**given, force=True)
        self.put_service(kind, desired, of_running)

    def fail_deployment(self, kind: str, reason: str) -> None:
        """Let ECS have given up a service's deployment, which moto never does."""
        given = {"cluster": self.outputs["cluster_name"], "services": list(self.outputs["services"].values())}
        described = self.aws("ecs").describe_services(**given)["services"]
        for service in described:
            deployments = [{"status": "PRIMARY", "rolloutState": "FAILED", "rolloutStateReason": reason}]
            failed = service["serviceName"] == self.outputs["services"][kind]
            service["deployments"] = deployments if failed else []
        self.front.answers["DescribeServices"] = json.loads(json.dumps({"services": described}, default=_timestamp))

    def stop_task(self, task: dict[str, Any]) -> None:
        """Let ECS know only one task, which has stopped."""
        self.front.answers["ListTasks"] = {"taskArns": ["arn:aws:ecs:us-east-1:123456789012:task/ray/1"]}
        self.front.answers["DescribeTasks"] = {"tasks": [{"stoppedAt": time.time(), **task}]}

    def mark_unhealthy(self) -> str:
        """Mark an instance of the workers unhealthy, and return its ID."""
        autoscaling = self.aws("autoscaling")
        [group] = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[f"{self.prefix}-group"])[
            "AutoScalingGroups"
        ]
        instance_id = group["Instances"][0]["InstanceId"]
        autoscaling.set_instance_health(InstanceId=instance_id, HealthStatus="Unhealthy")
        return instance_id


def _timestamp(value: datetime) -> float:
    return value.timestamp()


@contextmanager
def laptop(aws_url: str, folder: Path) -> Generator[Laptop]:
    """A stack with a head and two workers, and a laptop."""
    with serving(Front(aws_url)) as front, serving(RayHead()) as head:
        made = Laptop(front, head, folder, f"ray-on-ecs-{next(NUMBERS)}")
        _make(made)
        made.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))},
            **environment(front.url),
            "PATH": f"{BIN}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(folder),
            "AWS_STAND_IN_HOSTS": json.dumps({HEAD_HOST: f"127.0.0.1:{head.server_port}"}),
        }
        yield made


def _make(made: Laptop) -> None:
    prefix, ec2 = made.prefix, made.aws("ec2")
    instance = ec2.run_instances(
        ImageId=IMAGE, InstanceType="m5.xlarge", MinCount=1, MaxCount=1, Placement={"AvailabilityZone": "us-east-1a"}
    )["Instances"][0]["InstanceId"]
    made.outputs = {
        "region": REGION,
        "bucket": f"{prefix}-bucket",
        "cluster_name": f"{prefix}-ray-c0ffee",
        "head_instance_id": instance,
        "head_host": HEAD_HOST,
        "token_parameter": f"{prefix}-token",
        "cluster_info_parameter": f"{prefix}-info",
        "shell_document": f"{prefix}-shell",
        "forward_document": f"{prefix}-forward",
        "services": {kind: f"{prefix}-ray-{kind}-service" for kind in ("head", "workers")},
        "default_gpus": 2,
        "log_group": f"{prefix}-logs",
        "metrics_dashboard": f"{prefix}-dashboard",
        "estimated_hourly_usd": 2.204,
    }
    made.aws("s3").create_bucket(Bucket=made.outputs["bucket"])
    made.aws("ssm").put_parameter(Name=f"{prefix}-token", Type="SecureString", Value=TOKEN)
    made.put_workers()
    ecs = made.aws("ecs")
    ecs.create_cluster(clusterName=made.outputs["cluster_name"])
    container = {"name": "ray", "image": "image", "memory": 128}
    ecs.register_task_definition(family=prefix, containerDefinitions=[container])
    made.put_service("head", 1, 1)
    made.put_service("workers", 2, 2)
    autoscaling = made.aws("autoscaling")
    autoscaling.create_launch_configuration(LaunchConfigurationName=prefix, ImageId=IMAGE, InstanceType="g5.xlarge")
    autoscaling.create_auto_scaling_group(
        AutoScalingGroupName=f"{prefix}-group",
        LaunchConfigurationName=prefix,
        MinSize=0,
        MaxSize=2,
        DesiredCapacity=2,
        AvailabilityZones=["us-east-1a"],
    )
