"""A stack in the AWS of the tests, without Pulumi: the resources that the commands query, and its Ray head.

AWS is moto's, behind tests/front.py. All tests share the resources; a test's changes are undone at its end.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ray_on_ecs import cluster_info
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster_info import NodeGroup
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE, CLUSTERS_PREFIX
from ray_on_ecs.jobs.documents import HEAD, Documents, HeadState
from ray_on_ecs.node import ports, ray_status
from ray_on_ecs.storage.bucket import Bucket, NoBucket
from tests.aws import REGION, client, environment
from tests.front import Front
from tests.ray_on_ecs.cli.folders import age_object, job
from tests.ray_on_ecs.ray_head import TOKEN, RayHead
from tests.worker_pools import node_group, workers

BIN = Path(__file__).with_name("bin")
REPOSITORY = Path(__file__).parents[3]
HEAD_HOST = "head.ray.internal"
PREFIX = "ray-on-ecs"
# One of the images that moto knows.
IMAGE = "ami-12c6146b"
# The tasks of each service, and those of the kinds that `put_pools` adds.
TASKS = {"head": 1, "workers": 2}
OF_POOLS = {"workers-b": 0, "h100-workers": 1}
SECONDS = 120

LAUNCH = """<DescribeScalingActivitiesResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">
<DescribeScalingActivitiesResult><Activities><member><ActivityId>1</ActivityId>
<AutoScalingGroupName>g</AutoScalingGroupName><Cause>c</Cause><Description>Launching a new EC2 instance</Description>
<StartTime>{began}</StartTime><StatusCode>{status}</StatusCode><StatusMessage>{why}</StatusMessage></member></Activities>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"""
GROUP = """<DescribeAutoScalingGroupsResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">
<DescribeAutoScalingGroupsResult><AutoScalingGroups><member><AutoScalingGroupName>{name}</AutoScalingGroupName>
<MinSize>0</MinSize><MaxSize>2</MaxSize><DesiredCapacity>2</DesiredCapacity><Instances>{members}</Instances>
<AvailabilityZones><member>us-east-1a</member></AvailabilityZones><SuspendedProcesses>{processes}</SuspendedProcesses>
</member></AutoScalingGroups></DescribeAutoScalingGroupsResult></DescribeAutoScalingGroupsResponse>"""
MEMBER = """<member><InstanceId>i-{number}</InstanceId><AvailabilityZone>us-east-1a</AvailabilityZone>
<LifecycleState>{state}</LifecycleState><HealthStatus>Healthy</HealthStatus></member>"""
NO_CAPACITY = "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested."


@dataclass
class Account:
    """A stack in AWS."""

    url: str  # of AWS
    outputs: dict[str, Any]
    undo: ExitStack = field(default_factory=ExitStack, kw_only=True)  # of the changes of a test

    def aws(self, service: str) -> Any:
        """A client of the AWS behind the refusals."""
        return client(service, self.url)

    def put_token(self, value: str = TOKEN) -> None:
        """Write the parameter with Ray's token."""
        name = self.outputs["token_parameter"]
        self.aws("ssm").put_parameter(Name=name, Type="SecureString", Value=value, Overwrite=True)
        if value != TOKEN:
            self.undo.callback(self.put_token)

    def delete_token(self) -> None:
        """Delete the parameter with Ray's token, as if the stack were down."""
        self.aws("ssm").delete_parameter(Name=self.outputs["token_parameter"])
        self.undo.callback(self.put_token)

    def delete_bucket(self) -> None:
        self.empty_bucket()
        s3, bucket = self.aws("s3"), self.outputs["bucket"]
        s3.delete_bucket(Bucket=bucket)
        self.undo.callback(s3.create_bucket, Bucket=bucket)

    def empty_bucket(self) -> None:
        s3, bucket = self.aws("s3"), self.outputs["bucket"]
        for item in s3.list_objects_v2(Bucket=bucket).get("Contents", ()):
            s3.delete_object(Bucket=bucket, Key=item["Key"])

    def put_workers(self, groups: dict[str, dict[str, Any]] | None = None, **changed: Any) -> None:
        """Write the parameter with the cluster's description; `groups` has the changed values of its kinds."""
        made = {kind: group_of(kind, values) for kind, values in (groups or {"workers": {}}).items()}
        facts = {**workers(), "groups": made, "prices": {"g5.xlarge": 1.006}, "head_usd": 0.192}
        document = {key: value for key, value in (facts | changed).items() if value is not ...}
        self.aws("ssm").put_parameter(Name=f"{PREFIX}-info", Type="String", Value=json.dumps(document), Overwrite=True)
        if groups or changed:
            self.undo.callback(self.put_workers)

    def put_pools(self, changed: dict[str, dict[str, Any]] | None = None) -> None:
        """Let the default pool have a second zone, and add a pool with H100s; `changed` are their values by kind."""
        h100 = {"pool": "h100", "zones": ["us-east-1c"], "types": ["p5.48xlarge"], "gpu": "H100", "units": 8}
        groups: dict[str, dict[str, Any]] = {
            "workers": {},
            "workers-b": {"zones": ["us-east-1b"]},
            "h100-workers": h100,
        }
        for kind, values in (changed or {}).items():
            groups[kind] = groups.get(kind, h100) | values
        self.outputs["services"] |= {kind: service_name(kind) for kind in groups}
        self.put_workers(groups, prices={"g5.xlarge": 1.006, "p5.48xlarge": 55.04})

    def put_alarm(self, kind: str, state: str = "OK") -> None:
        """Make the alarm that stops idle nodes of a kind, in this state."""
        cloudwatch, full = self.aws("cloudwatch"), f"{self.outputs['cluster_name']}-{kind}-idle"
        cloudwatch.put_metric_alarm(
            AlarmName=full,
            ComparisonOperator="GreaterThanThreshold",
            EvaluationPeriods=10,
            MetricName="GPUs",
            Namespace=PREFIX,
            Period=60,
            Statistic="Maximum",
            Threshold=0,
        )
        cloudwatch.set_alarm_state(AlarmName=full, StateValue=state, StateReason="a test")
        if state != "OK":
            self.undo.callback(self.put_alarm, kind)

    def put_target(self, kind: str, suspended: bool = False) -> None:
        self.aws("application-autoscaling").register_scalable_target(
            ServiceNamespace="ecs",
            ResourceId=f"service/{self.outputs['cluster_name']}/{service_name(kind)}",
            ScalableDimension="ecs:service:DesiredCount",
            MinCapacity=0,
            MaxCapacity=2,
            SuspendedState={"DynamicScalingInSuspended": suspended},
        )
        if suspended:
            self.undo.callback(self.put_target, kind)

    def put_service(self, kind: str, of_running: int) -> None:
        """Make a service with this number of running tasks."""
        with mock.patch.dict(os.environ, {"MOTO_ECS_SERVICE_RUNNING": str(of_running)}):
            self.aws("ecs").create_service(
                cluster=self.outputs["cluster_name"],
                serviceName=service_name(kind),
                taskDefinition=PREFIX,
                desiredCount=(TASKS | OF_POOLS)[kind],
            )

    def replace_service(self, kind: str, of_running: int) -> None:
        names = {"cluster": self.outputs["cluster_name"], "service": service_name(kind)}
        self.aws("ecs").delete_service(**names, force=True)
        self.put_service(kind, of_running)
        if of_running != (number := (TASKS | OF_POOLS)[kind]):
            self.undo.callback(self.replace_service, kind, number)

    def mark_unhealthy(self) -> str:
        """Mark an instance of the workers unhealthy, and return its ID."""
        autoscaling = self.aws("autoscaling")
        [group] = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group_name("workers")])[
            "AutoScalingGroups"
        ]
        instance_id = group["Instances"][0]["InstanceId"]
        set_health = partial(autoscaling.set_instance_health, InstanceId=instance_id)
        set_health(HealthStatus="Unhealthy")
        self.undo.callback(set_health, HealthStatus="Healthy")
        return instance_id


def create_account(url: str) -> Account:
    """Create a stack with a head and two workers."""
    account = Account(url, {})
    [instance] = account.aws("ec2").run_instances(
        ImageId=IMAGE, InstanceType="m5.xlarge", MinCount=1, MaxCount=1, Placement={"AvailabilityZone": "us-east-1a"}
    )["Instances"]
    account.outputs = {
        "region": REGION,
        "bucket": f"{PREFIX}-bucket",
        "cluster_name": f"{PREFIX}-ray-c0ffee",
        "head_instance_id": instance["InstanceId"],
        "head_host": HEAD_HOST,
        "token_parameter": f"{PREFIX}-token",
        "cluster_info_parameter": f"{PREFIX}-info",
        "shell_document": f"{PREFIX}-shell",
        "forward_document": f"{PREFIX}-forward",
        "services": {kind: service_name(kind) for kind in TASKS},
        "log_group": f"{PREFIX}-logs",
        "estimated_hourly_usd": 2.204,
        "idle_hourly_usd": {"head": 0.192, "its disk": 0.012, "NAT gateway": 0.05, "CloudWatch": 0.02},
    }
    account.aws("s3").create_bucket(Bucket=account.outputs["bucket"])
    account.put_token()
    account.put_workers()
    ecs = account.aws("ecs")
    ecs.create_cluster(clusterName=account.outputs["cluster_name"])
    container = {"name": "ray", "image": "image", "memory": 128}
    ecs.register_task_definition(family=PREFIX, containerDefinitions=[container])
    for kind, number in (TASKS | OF_POOLS).items():
        account.put_service(kind, number)
    autoscaling = account.aws("autoscaling")
    for kind, number, instance_type, zone in (
        ("workers", 2, "g5.xlarge", "us-east-1a"),
        ("workers-b", 0, "g5.xlarge", "us-east-1b"),
        ("h100-workers", 1, "p5.48xlarge", "us-east-1c"),
    ):
        autoscaling.create_launch_configuration(LaunchConfigurationName=kind, ImageId=IMAGE, InstanceType=instance_type)
        autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=group_name(kind),
            LaunchConfigurationName=kind,
            MinSize=0,
            MaxSize=2,
            DesiredCapacity=number,
            AvailabilityZones=[zone],
        )
        account.put_alarm(kind)
        account.put_target(kind)
    return account


def service_name(kind: str) -> str:
    return f"{PREFIX}-ray-{kind}-service"


def group_name(kind: str) -> str:
    return f"{PREFIX}-{kind}-group"


def group_of(kind: str, changed: dict[str, Any]) -> NodeGroup:
    """A node group in the cluster's description; by default of two g5.xlarge."""
    names = {"group": group_name(kind), "provider": f"{PREFIX}-{kind}-provider"}
    values: Any = {"zone": "us-east-1a", "max": 2, **names, **changed}
    return node_group(**values)


@dataclass
class Laptop(Account):
    """A stack in AWS, and a laptop with its outputs in a file and Session Manager's plugin."""

    front: Front  # AWS for the laptop
    head: RayHead
    folder: Path  # an empty one, in which the commands run
    variables: dict[str, str] = field(init=False)  # of the laptop's environment

    def __post_init__(self) -> None:
        self.front.reset()
        self.head.reset()
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))},
            **environment(self.front.url),
            "PATH": f"{BIN}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(self.folder),
            "AWS_STAND_IN_HOSTS": json.dumps({HEAD_HOST: f"127.0.0.1:{self.head.server_port}"}),
        }

    @property
    def documents(self) -> Documents:
        keys: dict[str, Any] = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        root = f"{self.outputs['bucket']}/{CLUSTERS_PREFIX}/{self.outputs['cluster_name']}"
        return Documents(Bucket(endpoint_url=self.url, region_name=REGION, **keys), root)

    def put_state(self) -> None:
        """Write the head's state as its desk does, or delete it."""
        documents, path = self.documents, self.documents.path(HEAD)
        self.undo.callback(self._delete_state)
        if not self.head.is_up:
            return documents.store.delete(path)
        own_port = mock.patch.object(ports, "DASHBOARD", self.head.server_port)
        known = {"RAY_AUTH_TOKEN": TOKEN, CLUSTER_INFO_VARIABLE: self.outputs["cluster_info_parameter"]}
        new = mock.patch.dict(cluster_info._answers, clear=True)
        with own_port, new, mock.patch.dict(os.environ, environment(self.url) | known):
            ray = ray_status.read() if self.head.has_ray else {}
        jobs = [job(f"run-{number}", state) for number, state in enumerate(self.head.jobs)]
        with documents.store.writing(path) as file:
            file.write(HeadState(jobs=jobs, ray=ray, code=self.head.code).to_json())
        self._age(path.partition("/")[2], self.head.silent_seconds)

    def _delete_state(self) -> None:
        with suppress(NoBucket):
            self.documents.store.delete(self.documents.path(HEAD))

    def _age(self, key: str, seconds: float) -> None:
        age_object(self.outputs["bucket"], key, seconds)

    def run(self, *arguments: str, with_state: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `ray-on-ecs` with the stack's outputs, in this process, after the head has written its state."""
        if self.outputs and with_state:
            with suppress(NoBucket):
                self.put_state()
        return self.run_alone(*arguments, *self.outputs_flag(), **variables)

    def run_alone(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `ray-on-ecs` in this process."""
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.variables, **variables}, clear=True),
            chdir(self.folder),
            redirect_stdout(stdout),
            redirect_stderr(stderr),
        ):
            status = main([*arguments])
        return subprocess.CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())

    def run_process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m ray_on_ecs` with the stack's outputs."""
        return subprocess.run(
            [sys.executable, "-m", "ray_on_ecs", *arguments, *self.outputs_flag()],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
        )

    def outputs_flag(self) -> tuple[str, str]:
        file = self.folder / "outputs.json"
        file.write_text(json.dumps(self.outputs))
        return "--outputs", str(file)

    def put_deployments(self, kind: str, *deployments: dict[str, Any]) -> None:
        """Let a service have these deployments, and others none."""
        name = self.outputs["services"][kind]
        self.put_services(lambda service: {"deployments": list(deployments) * (service["serviceName"] == name)})

    def put_services(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let ECS describe each service with these changes."""
        names = {"cluster": self.outputs["cluster_name"], "services": list(self.outputs["services"].values())}
        services = [each | change(each) for each in self.aws("ecs").describe_services(**names)["services"]]
        changed = json.dumps({"services": services}, default=datetime.timestamp)
        self.front.answers["DescribeServices"] = json.loads(changed)

    def fail_launch(self, status: str = "Failed", why: str = NO_CAPACITY, minutes_ago: float = 1) -> None:
        """Let the workers lack an instance, and their last launch have ended like this."""
        self.put_group("InService")
        began = (datetime.now(UTC) - timedelta(minutes=minutes_ago)).isoformat()
        self.front.texts["DescribeScalingActivities"] = LAUNCH.format(began=began, why=why, status=status)

    def put_group(self, *states: str, suspended: str = "") -> None:
        """Let the workers' group want two instances, and have some in these states."""
        members = "".join(MEMBER.format(number=number, state=state) for number, state in enumerate(states))
        processes = f"<member><ProcessName>{suspended}</ProcessName></member>" if suspended else ""
        self.front.texts["DescribeAutoScalingGroups"] = GROUP.format(
            name=group_name("workers"), members=members, processes=processes
        )

    def refuse(self, *operations: str) -> None:
        """Refuse operations of S3, whose paths may have {bucket}."""
        self.front.refused |= {operation.format(**self.outputs) for operation in operations}

    def put_run(self, name: str, state: str = "failed", *, silent_seconds: float = 0.0, **status: Any) -> None:
        """Write the folder of a run in this state."""
        s3, bucket, key = self.aws("s3"), self.outputs["bucket"], f"runs/{name}/status.json"
        status = {"state": state, "started": datetime.now(UTC).isoformat(), **status}
        s3.put_object(Bucket=bucket, Key=key, Body=json.dumps(status))
        self.undo.callback(s3.delete_object, Bucket=bucket, Key=key)
        self._age(key, silent_seconds)

    def stop_task(self, task: dict[str, Any]) -> None:
        """Let ECS know only one task, which has stopped."""
        self.front.answers["ListTasks"] = {"taskArns": ["arn:aws:ecs:us-east-1:123456789012:task/ray/1"]}
        self.front.answers["DescribeTasks"] = {"tasks": [{"stoppedAt": time.time(), **task}]}
