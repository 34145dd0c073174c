"""All AWS calls of `ray_on_ecs`, with who makes each, against the policies of these people and tasks.

A call that the table lacks fails, as does one that no policy allows, or that reaches another cluster.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from ray_on_ecs.contract import key_of
from tests.iam import as_list, is_allowed
from tests.infra.fake_aws import ACCOUNT, PROJECT, REGION, STACK, Cloud
from tests.infra.reserved import BLOCK, POOL
from tests.infra.stacks import EVERYTHING, KEY, deploy

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "ray_on_ecs"
# Callers: people by their policy, and tasks by their role.
LAPTOP, SESSIONS, DEPLOYER = "trainer.json", "sessions.json", "deployer*.json"
HEAD, WORKER, CPU_WORKER, BLOCK_WORKER = "head", "worker", "cpu-worker", "h100-worker-c"
TASKS = HEAD, WORKER, CPU_WORKER, BLOCK_WORKER
ALL = LAPTOP, *TASKS
LOOKERS = LAPTOP, HEAD
# The account's administrator, whose commands are not in a policy of the project.
ADMINISTRATOR = ""

CLUSTER, BUCKET = "ray-on-ecs-ray-dev-c0ffee", "training-bucket"
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hf-a1b2c3"
OF_REGION = f"{REGION}:{ACCOUNT}"
MOCKED = f"arn:aws:service:{OF_REGION}:ray-on-ecs"
# The resources of the calls: as AWS names them, and as the mocks do, whose ARNs the roles of the tasks have.
RESOURCES: dict[str, tuple[str, ...]] = {
    "anything": ("*", "*"),
    "bucket": (f"arn:aws:s3:::{BUCKET}",) * 2,
    "run": (f"arn:aws:s3:::{BUCKET}/runs/first/file",) * 2,
    "state": (f"arn:aws:s3:::{BUCKET}/clusters/{CLUSTER}/head.json",) * 2,
    "bell": (f"arn:aws:s3:::{BUCKET}/clusters/{CLUSTER}/bell",) * 2,
    "own-request": (f"arn:aws:s3:::{BUCKET}/clusters/{CLUSTER}/requests/AROA:me/1.json",) * 2,
    "data-bucket": ("arn:aws:s3:::my-data",) * 2,
    "data": ("arn:aws:s3:::my-data/train/0.tar",) * 2,
    "cluster": (f"arn:aws:ecs:{OF_REGION}:cluster/{CLUSTER}",) * 2,
    "service": (f"arn:aws:ecs:{OF_REGION}:service/{CLUSTER}/ray-on-ecs-ray-head-1a2b",) * 2,
    "workers": (
        f"arn:aws:ecs:{OF_REGION}:service/{CLUSTER}/ray-on-ecs-ray-workers-1a2b",
        f"arn:aws:ecs:{OF_REGION}:service/{CLUSTER}/ray-on-ecs-ray-workers-service",
    ),
    "other-workers": (
        f"arn:aws:ecs:{OF_REGION}:service/{CLUSTER}/ray-on-ecs-ray-workers-a-1a2b",
        f"arn:aws:ecs:{OF_REGION}:service/{CLUSTER}/ray-on-ecs-ray-workers-a-service",
    ),
    "provider": (f"arn:aws:ecs:{OF_REGION}:capacity-provider/ray-on-ecs-workers-provider-1a2b",) * 2,
    "target": (f"arn:aws:application-autoscaling:{OF_REGION}:scalable-target/0a1b",) * 2,
    "task": (f"arn:aws:ecs:{OF_REGION}:task/{CLUSTER}/0a1b",) * 2,
    "node": (f"arn:aws:ecs:{OF_REGION}:container-instance/{CLUSTER}/0a1b",) * 2,
    "cluster-info": (
        f"arn:aws:ssm:{OF_REGION}:parameter/ray-on-ecs-cluster-info-parameter-1a2b",
        f"{MOCKED}-cluster-info-parameter",
    ),
    "token": (f"arn:aws:ssm:{OF_REGION}:parameter/ray-on-ecs-auth-parameter-1a2b",) * 2,
    "run-secret": (f"arn:aws:ssm:{OF_REGION}:parameter/ray-on-ecs/{CLUSTER}/runs/first/0a1b/TOKEN",) * 2,
    "job-secret": (SECRET, SECRET),
    "group": (
        f"arn:aws:autoscaling:{OF_REGION}:autoScalingGroup:0a1b:autoScalingGroupName/ray-on-ecs-workers-group-1a2b",
        f"{MOCKED}-workers-group",
    ),
    "other-group": (
        f"arn:aws:autoscaling:{OF_REGION}:autoScalingGroup:0a1b:autoScalingGroupName/ray-on-ecs-workers-a-group-1a2b",
        f"{MOCKED}-workers-a-group",
    ),
    "instance": (f"arn:aws:ec2:{OF_REGION}:instance/i-0abc",) * 2,
    "document": (f"arn:aws:ssm:{OF_REGION}:document/ray-on-ecs-sessions-forward-1a2b",) * 2,
    "session": (f"arn:aws:ssm:{OF_REGION}:session/AROA:me-0a1b",) * 2,
    "alarm": (f"arn:aws:cloudwatch:{OF_REGION}:alarm:{CLUSTER}-workers-idle-1a2b",) * 2,
    "log-group": (f"arn:aws:logs:{OF_REGION}:log-group:ray-on-ecs-ray-logs-1a2b:*",) * 2,
    "key-by-s3": (KEY, KEY),
    "key-by-ssm": (KEY, KEY),
    "key-by-secretsmanager": (KEY, KEY),
}
CONTEXT = {
    "aws:ResourceTag/ray-on-ecs:project": PROJECT,
    "aws:ResourceTag/ray-on-ecs:stack": STACK,
    "aws:userid": "AROA:me",
    "ssm:SessionDocumentAccessCheck": "true",
    "ecs:cluster": f"arn:aws:ecs:{OF_REGION}:cluster/{CLUSTER}",
    "cloudwatch:namespace": f"ray-on-ecs/{CLUSTER}",
}

Needs = dict[str | tuple[str, ...], str]
READ, WRITE = "s3:GetObject run, kms:Decrypt key-by-s3", "s3:PutObject run, kms:GenerateDataKey key-by-s3"
DATA = {TASKS: "s3:GetObject data"}
RESERVATIONS = "ec2:DescribeCapacityReservations anything"
# Each call by its file and boto3 method, with the IAM actions and resources that each of its callers needs.
# https://docs.aws.amazon.com/service-authorization/latest/reference/
CALLS: dict[tuple[str, str], Needs] = {
    ("cluster/aws.py", "describe_container_instances"): {LAPTOP: "ecs:DescribeContainerInstances node"},
    ("cluster/aws.py", "describe_tasks"): {LAPTOP: "ecs:DescribeTasks task"},
    ("cluster/aws.py", "get_caller_identity"): {LAPTOP: ""},
    ("cluster/aws.py", "get_parameter"): {
        LAPTOP: "ssm:GetParameter cluster-info",
        SESSIONS: "ssm:GetParameter token, kms:Decrypt key-by-ssm",
    },
    ("cluster/aws.py", "list_tasks"): {LAPTOP: "ecs:ListTasks node"},
    ("cluster/aws_status.py", "describe_auto_scaling_groups"): {
        LAPTOP: "autoscaling:DescribeAutoScalingGroups anything"
    },
    ("cluster/aws_status.py", "describe_services"): {LAPTOP: "ecs:DescribeServices service"},
    ("cluster/scale_in.py", "describe_alarms"): {LAPTOP: "cloudwatch:DescribeAlarms anything"},
    ("cluster/scale_in.py", "describe_scalable_targets"): {
        LAPTOP: "application-autoscaling:DescribeScalableTargets anything"
    },
    ("cluster/clusters.py", "head_bucket"): {LAPTOP: "s3:ListBucket bucket"},
    ("cluster/wake.py", "put_metric_data"): {LAPTOP: "cloudwatch:PutMetricData anything"},
    ("cluster/session.py", "start_session"): {SESSIONS: "ssm:StartSession instance, ssm:StartSession document"},
    ("cluster/session.py", "terminate_session"): {SESSIONS: "ssm:TerminateSession session"},
    ("cli/doctor.py", "describe_instance_information"): {LAPTOP: "ssm:DescribeInstanceInformation anything"},
    ("cli/doctor.py", "get_caller_identity"): {LAPTOP: ""},
    ("cli/status.py", "describe_capacity_reservations"): {LAPTOP: RESERVATIONS},
    ("cli/status.py", "get_caller_identity"): {LAPTOP: ""},
    ("cluster_info.py", "get_parameter"): {HEAD: "ssm:GetParameter cluster-info"},
    ("node/block.py", "describe_capacity_reservations"): {BLOCK_WORKER: RESERVATIONS},
    ("node/metrics.py", "put_metric_data"): {HEAD: "cloudwatch:PutMetricData anything"},
    ("node/replacement.py", "describe_auto_scaling_groups"): {WORKER: "autoscaling:DescribeAutoScalingGroups anything"},
    ("node/replacement.py", "describe_auto_scaling_instances"): {
        WORKER: "autoscaling:DescribeAutoScalingInstances anything"
    },
    ("node/replacement.py", "set_instance_health"): {WORKER: "autoscaling:SetInstanceHealth group"},
    ("node/scaling.py", "describe_auto_scaling_groups"): {HEAD: "autoscaling:DescribeAutoScalingGroups anything"},
    ("node/scaling.py", "describe_container_instances"): {HEAD: "ecs:DescribeContainerInstances node"},
    ("node/scaling.py", "describe_services"): {HEAD: "ecs:DescribeServices service"},
    ("node/scaling.py", "list_container_instances"): {HEAD: "ecs:ListContainerInstances cluster"},
    ("node/scaling.py", "list_services"): {HEAD: "ecs:ListServices anything"},
    ("node/scaling.py", "set_desired_capacity"): {
        HEAD: "autoscaling:SetDesiredCapacity group, autoscaling:SetDesiredCapacity other-group"
    },
    ("node/scaling.py", "terminate_instance_in_auto_scaling_group"): {
        HEAD: (
            "autoscaling:TerminateInstanceInAutoScalingGroup group, "
            "autoscaling:TerminateInstanceInAutoScalingGroup other-group"
        )
    },
    ("node/scaling.py", "update_service"): {HEAD: "ecs:UpdateService workers, ecs:UpdateService other-workers"},
    ("run/shortage.py", "describe_capacity_reservations"): {HEAD: RESERVATIONS},
    ("run/shortage.py", "describe_scaling_activities"): {HEAD: "autoscaling:DescribeScalingActivities anything"},
    ("starting/look.py", "describe_auto_scaling_groups"): {LOOKERS: "autoscaling:DescribeAutoScalingGroups anything"},
    ("starting/look.py", "describe_capacity_providers"): {LOOKERS: "ecs:DescribeCapacityProviders provider"},
    ("starting/look.py", "describe_container_instances"): {LOOKERS: "ecs:DescribeContainerInstances node"},
    ("starting/look.py", "describe_scaling_activities"): {LOOKERS: "autoscaling:DescribeScalingActivities anything"},
    ("starting/look.py", "describe_services"): {LOOKERS: "ecs:DescribeServices service"},
    ("starting/look.py", "describe_tasks"): {LOOKERS: "ecs:DescribeTasks task"},
    ("starting/look.py", "list_container_instances"): {LOOKERS: "ecs:ListContainerInstances cluster"},
    ("starting/look.py", "list_services"): {HEAD: "ecs:ListServices anything"},
    ("starting/look.py", "list_tasks"): {LOOKERS: "ecs:ListTasks node"},
    ("secrets.py", "delete_parameters"): {(LAPTOP, HEAD): "ssm:DeleteParameters run-secret"},
    ("secrets.py", "get_parameters"): {TASKS: "ssm:GetParameters run-secret, kms:Decrypt key-by-ssm"},
    ("secrets.py", "get_secret_value"): {
        TASKS: "secretsmanager:GetSecretValue job-secret, kms:Decrypt key-by-secretsmanager"
    },
    # SSM encrypts a parameter of the standard tier itself, and one of the advanced tier with a data key.
    ("secrets.py", "put_parameter"): {
        (LAPTOP, HEAD): "ssm:PutParameter run-secret, kms:Encrypt key-by-ssm, kms:GenerateDataKey key-by-ssm"
    },
    # A missing object is an error 404 only for who may list the bucket.
    ("storage/bucket.py", "head_object"): {ALL: f"{READ}, s3:ListBucket bucket", LAPTOP: "s3:GetObject state", **DATA},
    ("storage/bucket.py", "get_object"): {ALL: f"{READ}, s3:ListBucket bucket", LAPTOP: "s3:GetObject state", **DATA},
    ("storage/bucket.py", "list_objects_v2"): {ALL: "s3:ListBucket bucket", TASKS: "s3:ListBucket data-bucket"},
    ("storage/bucket.py", "put_object"): {
        ALL: WRITE,
        LAPTOP: "s3:PutObject own-request, s3:PutObject bell",
        HEAD: "s3:PutObject state",
    },
    ("storage/bucket.py", "copy_object"): {ALL: f"{READ}, {WRITE}"},
    ("storage/bucket.py", "delete_object"): {
        ALL: "s3:DeleteObject run",
        (LAPTOP, HEAD): "s3:DeleteObject own-request",
    },
    ("storage/bucket.py", "delete_objects"): {ALL: "s3:DeleteObject run"},
    # The parts of an encrypted upload are decrypted when it is completed.
    ("storage/bucket.py", "create_multipart_upload"): {ALL: WRITE},
    ("storage/bucket.py", "upload_part"): {ALL: f"{WRITE}, kms:Decrypt key-by-s3"},
    ("storage/bucket.py", "complete_multipart_upload"): {ALL: f"{WRITE}, kms:Decrypt key-by-s3"},
    ("storage/bucket.py", "abort_multipart_upload"): {ALL: "s3:AbortMultipartUpload run"},
    ("tracking/cloudwatch.py", "put_metric_data"): {HEAD: "cloudwatch:PutMetricData anything"},
    ("tracking/cost.py", "describe_spot_price_history"): {LOOKERS: "ec2:DescribeSpotPriceHistory anything"},
}
# The AWS CLI's commands in messages, for the person who reads them.
TYPED: dict[str, Needs] = {
    "cloudwatch enable-alarm-actions": {LAPTOP: "cloudwatch:EnableAlarmActions alarm"},
    "ecs update-service": {DEPLOYER: "ecs:UpdateService service"},
    "application-autoscaling register-scalable-target": {
        DEPLOYER: "application-autoscaling:RegisterScalableTarget target"
    },
    "autoscaling resume-processes": {ADMINISTRATOR: ""},
    "ec2 get-console-output": {ADMINISTRATOR: ""},
    "iam create-service-linked-role": {ADMINISTRATOR: ""},
    "sso login": {LAPTOP: ""},
    "logs tail": {LAPTOP: "logs:FilterLogEvents log-group"},
}
# Calls that others make with these roles: the ECS agent for a task, Session Manager's plugin, and outputs of the stack.
OTHERS: dict[str, Needs] = {
    "wake_command": {LAPTOP: "cloudwatch:PutMetricData anything"},
    "train_command": {SESSIONS: "ec2:DescribeInstances anything"},
    "task protection": {TASKS: "ecs:UpdateTaskProtection task"},
    "plugin": {
        SESSIONS: "ssm:ResumeSession session, ssm:TerminateSession session, ssmmessages:OpenDataChannel session"
    },
}
# Permissions that AWS also requires for a call, and a policy withholds on purpose.
WITHHELD: dict[tuple[str, str], str] = {
    # No change of a group, by which it could start other instances or more than its maximum.
    (HEAD, "groups"): "autoscaling:UpdateAutoScalingGroup group, ec2:RunInstances instance, iam:PassRole anything",
    # Only people request runs.
    (HEAD, "requests"): "s3:PutObject own-request",
    (LAPTOP, "services"): "ecs:UpdateService service",
    (WORKER, "other groups"): "autoscaling:SetInstanceHealth other-group",
}


@cache
def operations() -> dict[str, set[str]]:
    """The boto3 methods of the services that the package calls, with these services."""
    found: dict[str, set[str]] = {}
    session = botocore.session.get_session()
    for service in services():
        for operation in session.get_service_model(service).operation_names:
            found.setdefault(xform_name(operation), set()).add(service)
    return found


@cache
def trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(SOURCES)): ast.parse(file.read_text()) for file in SOURCES.rglob("*.py")}


@cache
def services() -> frozenset[str]:
    """The services in the arguments of `client`, `call`, `ask` and other functions, by boto3's names."""
    known = set(botocore.session.get_session().get_available_services())
    return frozenset(
        str(node.args[0].value)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value in known
        and _name(node.func) in ("client", "call", "ask", "ask_aws", "listed", "_answer", "translated", "_connect")
    )


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def calls_in_sources() -> Iterator[tuple[str, str]]:
    """The file and method of each call: an attribute, or a text that a function like `aws.call` gets."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if isinstance(name, str) and name in operations():
                yield file, name


def test_the_table_has_every_call() -> None:
    scaling = {"application-autoscaling", "autoscaling"}
    assert {"s3", "ssm", "cloudwatch", "ecs", "ec2", "sts", "secretsmanager", *scaling} == services()
    assert set(calls_in_sources()) == CALLS.keys()


def test_the_table_has_every_command_of_a_message() -> None:
    texts = [file.read_text() for file in [*SOURCES.rglob("*.py"), ROOT / "docs" / "troubleshooting.md"]]
    known = {service.replace("_", "-") for service in botocore.session.get_session().get_available_services()}
    typed = {found for text in texts for found in re.findall(r"\baws ([a-z0-9-]+ [a-z]+[a-z-]*)", text)}
    assert {each for each in typed if each.split()[0] in known} == TYPED.keys()


@pytest.fixture(scope="module")
def account() -> Cloud:
    """The account of a stack with all optional parts."""
    pools = json.dumps({"h100": {key_of(field): value for field, value in POOL.items()}})
    config = {**EVERYTHING, "dataBuckets": "my-data", "jobSecrets": SECRET, "workerPools": pools}
    return deploy(config=config, reservations=(BLOCK,))


def statements(who: str, account: Cloud) -> list[Any]:
    """The policy of a person, with the names of the stack, or that of a task."""
    if not who.endswith(".json"):
        role = account.resources[f"{who}-task-role-policy"].inputs["role"]
        of_role = [each for each in account.of_type("aws:iam/rolePolicy:RolePolicy") if each.inputs["role"] == role]
        return [statement for each in of_role for statement in json.loads(each.inputs["policy"])["Statement"]]
    names = {
        "REGION": REGION,
        "ACCOUNT": ACCOUNT,
        "BUCKET": BUCKET,
        "CLUSTER": CLUSTER,
        "KEY_ID": KEY.rpartition("/")[2],
    }
    names |= {'"PROJECT"': f'"{PROJECT}"', '"STACK"': f'"{STACK}"'}
    found = []
    for file in (ROOT / "docs" / "policies").glob(who):
        text = file.read_text()
        for word, name in names.items():
            text = text.replace(word, name)
        found += json.loads(text)["Statement"]
    return found


def rows(needs: Needs) -> Iterator[tuple[str, str, str]]:
    """Callers with the actions and resources that they need."""
    for callers, text in needs.items():
        for who in as_list(callers) if isinstance(callers, str) else callers:
            for need in filter(None, text.split(", ")):
                action, _, resource = need.partition(" ")
                yield who, action, resource


def decide(who: str, action: str, resource: str, account: Cloud) -> tuple[bool, bool]:
    """Decisions on the request, and on the same one for another cluster's resource."""
    arn = RESOURCES[resource][who in TASKS]
    context = dict(CONTEXT)
    if resource.startswith("key-by-"):
        context["kms:ViaService"] = f"{resource.removeprefix('key-by-')}.{REGION}.amazonaws.com"
    # In the other cluster nothing has this stack's names, tags, key or namespace.
    other = re.sub(rf"{BUCKET}|my-data|{CLUSTER}|ray-on-ecs-\w[\w-]*|/1a2b$|hf-a1b2c3|i-0abc|AROA:me", "other", arn)
    others = {key: value for key, value in context.items() if key in ("aws:userid", "ssm:SessionDocumentAccessCheck")}
    allowed = statements(who, account)
    return is_allowed(allowed, action, arn, context), is_allowed(allowed, action, other, others)


# Actions without resources, with which nothing can be changed.
EVERYWHERE = {
    *("application-autoscaling:DescribeScalableTargets", "autoscaling", "cloudwatch:DescribeAlarms", "ec2"),
    "ssm:DescribeInstanceInformation",
}
ROWS = sorted(
    {(name, *row) for table in (CALLS, TYPED, OTHERS) for key, needs in table.items() for row in rows(needs)
     for name in [" ".join(key) if isinstance(key, tuple) else key]}
)  # fmt: skip


@pytest.mark.parametrize(("call", "who", "action", "resource"), ROWS)
def test_who_makes_a_call_may_make_it(call: str, who: str, action: str, resource: str, account: Cloud) -> None:
    here, elsewhere = decide(who, action, resource, account)
    assert here, f"{who} lacks {action} on {RESOURCES[resource]} for {call}"
    harmless = resource == "provider" or (resource == "anything" and {action, action.split(":")[0]} & EVERYWHERE)
    if who != DEPLOYER and not harmless:  # its names begin like those of the project's other stacks
        assert not elsewhere, f"{who} has {action} in other clusters"


@pytest.mark.parametrize(("who", "action", "resource"), [
    (who, *need.split(" ")) for (who, _), text in WITHHELD.items() for need in text.split(", ")
])  # fmt: skip
def test_what_is_withheld_is_denied(who: str, action: str, resource: str, account: Cloud) -> None:
    assert not decide(who, action, resource, account)[0]
