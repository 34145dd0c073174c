"""IAM policies: exact actions and resources."""

from __future__ import annotations

from typing import Any

import pytest

from infra.definitions import policies
from infra.types import Location
from tests.iam import WILDCARD_ACTIONS, is_allowed

BUCKET = "arn:aws:s3:::runs-bucket"
LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:ray"
TOKEN = "arn:aws:ssm:us-west-2:123456789012:parameter/auth"
ECR_URI = "123456789012.dkr.ecr.us-west-2.amazonaws.com/team/training"


def execution(image_uri: str) -> list[policies.Statement]:
    """Statements of the execution policy for an image."""
    return policies.execution(partition="aws", image_uri=image_uri, log_group_arn=LOGS, token_arn=TOKEN)["Statement"]


@pytest.mark.parametrize(
    "uri",
    [
        f"{ECR_URI}@sha256:00",
        f"{ECR_URI}:latest",
        f"{ECR_URI}:latest@sha256:00",
        ECR_URI,
        "123456789012.dkr-ecr.us-west-2.on.aws/team/training:latest",
        "123456789012.dkr.ecr-fips.us-west-2.amazonaws.com/team/training",
        "123456789012.dkr.ecr.us-west-2.amazonaws.com.cn/team/training",
    ],
)
def test_execution_role_covers_image_logs_and_token(uri: str) -> None:
    assert execution(uri) == [
        {"Effect": "Allow", "Action": ["ecr:GetAuthorizationToken"], "Resource": "*"},
        {
            "Effect": "Allow",
            "Action": ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            "Resource": "arn:aws:ecr:us-west-2:123456789012:repository/team/training",
        },
        {"Effect": "Allow", "Action": ["logs:CreateLogStream", "logs:PutLogEvents"], "Resource": f"{LOGS}:*"},
        {"Effect": "Allow", "Action": ["ssm:GetParameters"], "Resource": TOKEN},
    ]


@pytest.mark.parametrize("uri", ["public.ecr.aws/team/training:1", "docker.io/team/training:1", "python:3.11"])
def test_images_outside_ecr_need_no_ecr_permissions(uri: str) -> None:
    actions = [action for statement in execution(uri) for action in statement["Action"]]
    assert not any(action.startswith("ecr:") for action in actions)


def test_an_agent_reports_to_its_own_cluster_alone() -> None:
    cluster = "arn:aws-cn:ecs:cn-north-1:123456789012:cluster/ray-dev"
    of_cluster, of_instance, discover = policies.ecs_agent(cluster)["Statement"]
    assert of_cluster["Resource"] == cluster
    assert "ecs:RegisterContainerInstance" in of_cluster["Action"]
    assert of_instance["Resource"] == "arn:aws-cn:ecs:cn-north-1:123456789012:container-instance/*"
    assert of_instance["Condition"] == {"ArnEquals": {"ecs:cluster": cluster}}
    assert discover == {"Effect": "Allow", "Action": ["ecs:DiscoverPollEndpoint"], "Resource": "*"}


def test_tasks_use_the_whole_bucket_of_the_stack() -> None:
    listing, objects, requests = policies.training(partition="aws", bucket_arn=BUCKET)["Statement"]
    assert objects == {
        "Effect": "Allow",
        "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
        "Resource": f"{BUCKET}/*",
    }
    assert listing == {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": BUCKET}
    forged = {"Effect": "Deny", "Action": ["s3:PutObject"], "Resource": f"{BUCKET}/clusters/*/requests/*"}
    assert requests == forged, "only people request runs"


def test_data_buckets_are_read_only() -> None:
    sources = ("my-data", "other/images", "/other/labels/v2/", "my-data/part")
    policy = policies.training(partition="aws", bucket_arn="arn:aws:s3:::runs", data_buckets=sources)
    get, list_all, list_some = policy["Statement"][3:]
    other = "arn:aws:s3:::other"
    assert (get["Action"], list_all["Action"], list_some["Action"]) == (
        ["s3:GetObject"],
        ["s3:ListBucket"],
        ["s3:ListBucket"],
    )
    assert get["Resource"] == [
        *(f"arn:aws:s3:::my-data/{key}" for key in ("*", "part", "part/*")),
        *(f"{other}/{key}" for key in ("images", "images/*", "labels/v2", "labels/v2/*")),
    ]
    assert list_all["Resource"] == ["arn:aws:s3:::my-data"]
    assert "Condition" not in list_all
    assert list_some["Resource"] == other
    prefixes = ["images", "images/*", "labels/v2", "labels/v2/*"]
    assert list_some["Condition"] == {"StringLikeIfExists": {"s3:prefix": prefixes}}


def test_only_the_head_publishes_metrics_to_one_namespace() -> None:
    *_, publish = policies.training(partition="aws", bucket_arn=BUCKET, metrics_namespace="ray-on-ecs/dev")["Statement"]
    assert publish == {
        "Effect": "Allow",
        "Action": ["cloudwatch:PutMetricData"],
        "Resource": "*",
        "Condition": {"StringEquals": {"cloudwatch:namespace": "ray-on-ecs/dev"}},
    }
    assert len(policies.training(partition="aws", bucket_arn=BUCKET)["Statement"]) == 3


def test_a_task_protects_tasks_of_its_cluster_alone() -> None:
    tasks = "arn:aws:ecs:us-west-2:123456789012:task/ray/*"
    *_, protect = policies.training(partition="aws", bucket_arn=BUCKET, tasks_arn=tasks)["Statement"]
    assert protect == {"Effect": "Allow", "Action": ["ecs:UpdateTaskProtection"], "Resource": tasks}


def test_only_who_waits_for_workers_looks_at_them() -> None:
    facts = TOKEN.replace("auth", "facts")
    *_, read, look = policies.training(partition="aws", bucket_arn=BUCKET, parameter_arn=facts)["Statement"]
    assert read == {"Effect": "Allow", "Action": ["ssm:GetParameter"], "Resource": facts}
    actions = [*policies.LOOK_AT_GROUPS, policies.LOOK_AT_RESERVATIONS, policies.SPOT_PRICES]
    assert look == {"Effect": "Allow", "Action": actions, "Resource": "*"}


def test_only_who_waits_for_workers_reads_the_cluster() -> None:
    cluster = "arn:aws:ecs:us-west-2:123456789012:cluster/ray"
    *_, look, instances = policies.training(partition="aws", bucket_arn=BUCKET, cluster_arn=cluster)["Statement"]
    assert look["Condition"] == {"ArnEquals": {"ecs:cluster": cluster}}
    assert set(look["Action"]) <= WILDCARD_ACTIONS.keys()
    assert instances["Resource"] == [cluster, "arn:aws:ecs:us-west-2:123456789012:capacity-provider/*"]


def test_worker_role_can_replace_instances_of_its_group() -> None:
    group = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:1:autoScalingGroupName/workers"
    *_, look, mark = policies.training(partition="aws", bucket_arn=BUCKET, own_group_arn=group)["Statement"]
    assert look["Resource"] == "*"
    assert set(look["Action"]) <= WILDCARD_ACTIONS.keys()
    assert (mark["Action"], mark["Resource"]) == (["autoscaling:SetInstanceHealth"], group)


def test_the_head_scales_the_named_service_and_group_alone() -> None:
    of_cluster = "arn:aws:ecs:us-west-2:123456789012"
    group = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:1:autoScalingGroupName/workers"
    count, group_size = policies.scaling(
        cluster_arn=f"{of_cluster}:cluster/ray", service_name="workers", group_arn=group
    )["Statement"]
    assert (count["Action"], count["Resource"]) == (["ecs:UpdateService"], f"{of_cluster}:service/ray/workers")
    assert group_size["Action"] == [policies.SET_CAPACITY, policies.END_INSTANCE]
    assert group_size["Resource"] == group


def test_nat_instance_attaches_one_interface_to_itself_alone() -> None:
    of_ec2 = "arn:aws-cn:ec2:cn-north-1:123456789012"
    interface, profile = f"{of_ec2}:network-interface/eni-0a1b", "arn:aws-cn:iam::123456789012:instance-profile/ml/nat"
    statements = policies.nat_instance(interface_arn=interface, profile_arn=profile)["Statement"]
    attach = "ec2:AttachNetworkInterface"
    own, other = {"ec2:InstanceProfile": profile}, {"ec2:InstanceProfile": f"{profile}-2"}
    assert [statement["Action"] for statement in statements] == [[attach], [attach]]
    assert is_allowed(statements, attach, interface, {})
    assert not is_allowed(statements, attach, f"{of_ec2}:network-interface/eni-0c2d", {})
    assert is_allowed(statements, attach, f"{of_ec2}:instance/i-0abc", own)
    assert not is_allowed(statements, attach, f"{of_ec2}:instance/i-0abc", other)
    assert not is_allowed(statements, attach, f"{of_ec2}:instance/i-0abc", {})


def test_endpoints_are_for_principals_of_the_account() -> None:
    """A condition on the resource's account would close AWS's own resources and data buckets of other accounts."""
    (allow,) = policies.endpoint("123456789012")["Statement"]
    assert allow["Condition"] == {"StringEquals": {"aws:PrincipalAccount": "123456789012"}}
    location = Location(partition="aws-cn", region="cn-north-1", account="123456789012", zones=())
    own, of_aws = policies.s3_endpoint(location)["Statement"]
    assert own == allow
    assert of_aws["Action"] == "s3:GetObject"
    layers, *_ = of_aws["Resource"]
    assert layers == "arn:aws-cn:s3:::prod-cn-north-1-starport-layer-bucket/*"
    assert all("cn-north-1" in item for item in of_aws["Resource"])


KEY = "arn:aws:kms:us-west-2:123456789012:key/1"
SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret:registry"


def test_kms_key_is_used_only_via_services() -> None:
    *_, use = policies.training(partition="aws", bucket_arn=BUCKET, kms_key_arn=KEY)["Statement"]
    assert (use["Action"], use["Resource"]) == (["kms:Decrypt", "kms:GenerateDataKey"], KEY)
    assert use["Condition"] == {"StringLike": {"kms:ViaService": ["s3.us-west-2.amazonaws.*"]}}


def test_a_registrys_password_is_read_by_who_pulls() -> None:
    arguments = {"partition": "aws", "image_uri": "registry.example/ray:1", "log_group_arn": LOGS, "token_arn": TOKEN}
    *_, secret, use = policies.execution(**arguments, registry_secret_arn=SECRET, kms_key_arn=KEY)["Statement"]
    assert secret == {"Effect": "Allow", "Action": ["secretsmanager:GetSecretValue"], "Resource": SECRET}
    assert use["Action"] == ["kms:Decrypt"]
    assert [item.split(".")[0] for item in use["Condition"]["StringLike"]["kms:ViaService"]] == [
        "ssm",
        "secretsmanager",
    ]


def test_run_secrets_are_written_only_by_the_head() -> None:
    secrets = "arn:aws:ssm:us-west-2:123456789012:parameter/ray-on-ecs/ray/runs/*"
    arguments: Any = {"partition": "aws", "bucket_arn": BUCKET, "secrets_arn": secrets}
    *_, read = policies.training(**arguments)["Statement"]
    assert read == {"Effect": "Allow", "Action": ["ssm:GetParameters"], "Resource": secrets}
    *_, write = policies.training(**arguments, writes_secrets=True)["Statement"]
    assert write == {**read, "Action": ["ssm:GetParameters", "ssm:PutParameter", "ssm:DeleteParameters"]}
    for writes, actions in {
        False: ["kms:Decrypt"],
        True: ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"],
    }.items():
        *_, use = policies.training(**arguments, writes_secrets=writes, kms_key_arn=KEY)["Statement"]
        assert (use["Action"], use["Resource"]) == (actions, KEY)
        assert use["Condition"] == {"StringLike": {"kms:ViaService": ["ssm.us-west-2.amazonaws.*"]}}


def test_jobs_read_the_secrets_that_are_named() -> None:
    arguments: Any = {
        "partition": "aws",
        "bucket_arn": BUCKET,
        "job_secrets": (SECRET, f"{SECRET}-2"),
        "kms_key_arn": KEY,
    }
    *_, secrets, use = policies.training(**arguments)["Statement"]
    assert (secrets["Action"], secrets["Resource"]) == (
        ["secretsmanager:GetSecretValue"],
        [SECRET, f"{SECRET}-2"],
    )
    assert use["Action"] == ["kms:Decrypt"]
    assert use["Condition"] == {"StringLike": {"kms:ViaService": ["secretsmanager.us-west-2.amazonaws.*"]}}


def test_bucket_policy_denies_requests_without_tls() -> None:
    (deny,) = policies.tls_only(bucket_arn=BUCKET)["Statement"]
    assert (deny["Effect"], deny["Principal"], deny["Action"]) == ("Deny", "*", "s3:*")
    assert deny["Resource"] == [BUCKET, f"{BUCKET}/*"]
    assert deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
