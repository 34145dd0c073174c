"""IAM and bucket policies, as documents in a fixed order.

Pure functions: every document is data that a test can read, and becomes JSON only where a resource takes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Policy = dict[str, Any]

# What the agent of Session Manager calls, in place of SSH and an open port. AmazonSSMManagedInstanceCore, AWS's own
# policy, would also let every user with a session read all parameters of the account.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
SESSION_MANAGER = (
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
# What a job that waits for workers asks, to say why there are none, and does, where they may go to another zone.
LOOK_AT_GROUPS = ("autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities")
SPOT_PRICES = "ec2:DescribeSpotPriceHistory"
# A worker whose GPUs fail has its instance replaced.
LOOK_AT_INSTANCE = ("autoscaling:DescribeAutoScalingInstances", "autoscaling:DescribeAutoScalingGroups")
MARK_UNHEALTHY = "autoscaling:SetInstanceHealth"
# ECS's agent calls it with the role of the task that asks for protection.
PROTECT_TASK = "ecs:UpdateTaskProtection"
MOVE_GROUP, END_INSTANCE = "autoscaling:UpdateAutoScalingGroup", "autoscaling:TerminateInstanceInAutoScalingGroup"
# The secrets of runs, by their names.
READ_PARAMETERS = "ssm:GetParameters"
PUT_PARAMETER, DELETE_PARAMETERS = "ssm:PutParameter", "ssm:DeleteParameters"
# Actions that IAM can't restrict to a resource, and what holds them instead.
# https://docs.aws.amazon.com/service-authorization/latest/reference/
WILDCARD_ACTIONS = {
    "ecr:GetAuthorizationToken": "a registry's token is not tied to a repository; the pull itself is",
    "cloudwatch:PutMetricData": "metrics are no resources; the condition names the stack's own namespace",
    SPOT_PRICES: "prices of spot instances name no resource, and are public",
    **dict.fromkeys(
        (*LOOK_AT_GROUPS, *LOOK_AT_INSTANCE),
        "describing Auto Scaling groups names no resource in IAM; nothing is changed",
    ),
    **dict.fromkeys(SESSION_MANAGER, "Session Manager names no resource; an agent answers for its own instance alone"),
    "ecs:DiscoverPollEndpoint": "the address of ECS itself; nothing is read or changed",
}
# What the ECS agent calls: of a cluster, and of an instance in it. AWS's own policy for it,
# AmazonEC2ContainerServiceforEC2Role, allows the same in every cluster of the account, and all of ECR and CloudWatch
# Logs, which the execution role has here.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelasticcontainerservice.html
AGENT_OF_CLUSTER = (
    "ecs:RegisterContainerInstance",
    "ecs:DeregisterContainerInstance",
    "ecs:SubmitAttachmentStateChanges",
    "ecs:SubmitContainerStateChange",
    "ecs:SubmitTaskStateChange",
)
AGENT_OF_INSTANCE = ("ecs:Poll", "ecs:StartTelemetrySession", "ecs:UpdateContainerInstancesState")
# AWS's buckets that instances read without the account's credentials: image layers, packages of Amazon Linux, and what
# Systems Manager brings for its agent and for patches.
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html#ecr-minimum-s3-perms
# https://docs.aws.amazon.com/linux/al2023/ug/live-patching.html
# https://docs.aws.amazon.com/systems-manager/latest/userguide/ssm-agent-minimum-s3-permissions.html
BUCKETS_OF_AWS = (
    "prod-{region}-starport-layer-bucket",
    "al2023-repos-{region}-de612dc2",
    "amazon-ssm-{region}",
    "aws-ssm-{region}",
    "patch-baseline-snapshot-{region}",
)
# 123456789012.dkr.ecr.us-west-2.amazonaws.com/name, ECR's newer 123456789012.dkr-ecr.us-west-2.on.aws/name, and their
# likes in other partitions and with FIPS.
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)"
    r"\.(amazonaws\.(com|com\.cn|eu)|on\.aws|on\.amazonwebservices\.(com\.cn|eu))/(?P<name>[^:@]+)"
)


def assumed_by(service: str, **conditions: dict[str, str]) -> Policy:
    """Trust policy of a role that one AWS service takes on, such as ecs-tasks.amazonaws.com."""
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return _policy({**statement, "Condition": conditions} if conditions else statement)


def assumed_by_tasks(*, partition: str, region: str, account: str) -> Policy:
    """Trust policy of a task role: ECS takes it on for tasks of this account and region alone.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-iam-roles.html
    """
    source = f"arn:{partition}:ecs:{region}:{account}:*"
    return assumed_by(
        "ecs-tasks.amazonaws.com",
        ArnLike={"aws:SourceArn": source},
        StringEquals={"aws:SourceAccount": account},
    )


def ecs_agent(cluster_arn: str) -> Policy:
    """Policy of the ECS agent of an instance: it joins this cluster and reports to it."""
    instances = cluster_arn.partition(":cluster/")[0] + ":container-instance/*"
    of_cluster = {"ArnEquals": {"ecs:cluster": cluster_arn}}
    return _policy(
        _allow(list(AGENT_OF_CLUSTER), cluster_arn),
        {**_allow(list(AGENT_OF_INSTANCE), instances), "Condition": of_cluster},
        _allow(["ecs:DiscoverPollEndpoint"], "*"),
    )


def session_manager(*, partition: str, region: str, account: str) -> Policy:
    """What an instance may do so that Session Manager reaches it."""
    instances = f"arn:{partition}:ec2:{region}:{account}:instance/*"
    return _policy(_allow(["ssm:UpdateInstanceInformation"], instances), _allow(list(SESSION_MANAGER), "*"))


def execution(
    *,
    partition: str,
    image_uri: str,
    log_group_arn: str,
    token_arn: str,
    registry_secret_arn: str = "",
    kms_key_arn: str = "",
) -> Policy:
    """What the ECS agent may do to start a task: pull its image, write its logs, read Ray's token.

    The token is encrypted with the key that AWS manages for SSM, whose own policy lets the account's principals decrypt
    through SSM, so kms:Decrypt is needed for a key of one's own alone.
    """
    secret = [_allow(["secretsmanager:GetSecretValue"], registry_secret_arn)] if registry_secret_arn else []
    return _policy(
        *_pull(partition, image_uri),
        _allow(["logs:CreateLogStream", "logs:PutLogEvents"], f"{log_group_arn}:*"),
        _allow(["ssm:GetParameters"], token_arn),
        *secret,
        *_use_key(kms_key_arn, ["kms:Decrypt"], "ssm", "secretsmanager"),
    )


def training(
    *,
    partition: str,
    bucket_arn: str,
    tasks_arn: str | None = None,
    metrics_namespace: str | None = None,
    parameter_arn: str | None = None,
    group_arn: str | None = None,
    own_group_arn: str | None = None,
    data_buckets: Sequence[str] = (),
    secrets_arn: str | None = None,
    writes_secrets: bool = False,
    job_secrets: Sequence[str] = (),
    kms_key_arn: str = "",
) -> Policy:
    """Policy of a task: read and write the stack's bucket, and whatever else is given.

    The whole bucket, since one cluster is one trust domain: a Ray program may keep its checkpoints where it likes.
    That is the cluster's tasks, of which it protects its own from scale-in; a namespace for its metrics; the parameter
    with what the workers are and cost, and with it a look at their Auto Scaling group; that group itself, to move it to
    another zone; the group of the task's own instance, to have an instance replaced; other buckets to read from, each
    as `bucket` or `bucket/prefix`; the SSM parameters with the secrets of runs; and secrets of Secrets Manager.

    Two calls carry no prefix: HeadBucket, and S3's own check whether a missing key may be told as 404 instead of 403.
    PyArrow needs both, so the condition holds only where a prefix is given.
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html
    """
    objects = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    data = [statement for each in data_buckets for statement in _read(partition, each)]
    protect = [_allow([PROTECT_TASK], tasks_arn)] if tasks_arn else []
    workers = (
        [_allow(["ssm:GetParameter"], parameter_arn), _allow([*LOOK_AT_GROUPS, SPOT_PRICES], "*")]
        if parameter_arn
        else []
    )
    move = _move(group_arn) if group_arn else []
    replace = [_allow(list(LOOK_AT_INSTANCE), "*"), _allow([MARK_UNHEALTHY], own_group_arn)] if own_group_arn else []
    return _policy(
        _listing(bucket_arn, ""),
        _allow(objects, f"{bucket_arn}/*"),
        *_use_key(kms_key_arn, ["kms:Decrypt", "kms:GenerateDataKey"], "s3"),
        *data,
        *protect,
        *workers,
        *move,
        *replace,
        *_secrets(secrets_arn, job_secrets, kms_key_arn, writes=writes_secrets),
        *_publish(metrics_namespace),
    )


def tls_only(*, bucket_arn: str) -> Policy:
    """Bucket policy that refuses every request that is not encrypted on its way."""
    return _policy(
        {
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [bucket_arn, f"{bucket_arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
    )


def open_endpoint() -> Policy:
    """Policy that VPC endpoints have by default."""
    return _policy({"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"})


def endpoint(account: str) -> Policy:
    """Policy of a VPC endpoint: principals of this account alone, so that nothing leaves under other credentials."""
    return _policy(_of_account(account))


def s3_endpoint(*, partition: str, region: str, account: str) -> Policy:
    """The same for S3, and what instances read of AWS's own buckets.

    Buckets of other accounts stay open to this account's roles, as far as those are allowed to use them.
    """
    buckets = [f"arn:{partition}:s3:::{each.format(region=region)}/*" for each in BUCKETS_OF_AWS]
    of_aws = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": buckets}
    return _policy(_of_account(account), of_aws)


def _of_account(account: str) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "*",
        "Resource": "*",
        "Condition": {"StringEquals": {"aws:PrincipalAccount": account}},
    }


def _move(group_arn: str) -> list[dict[str, Any]]:
    """Statements that let a group be moved to another zone, but not resized: its size is what it costs."""
    of_size = {"Null": {"autoscaling:MaxSize": "true", "autoscaling:MinSize": "true"}}
    return [{**_allow([MOVE_GROUP], group_arn), "Condition": of_size}, _allow([END_INSTANCE], group_arn)]


def _secrets(
    parameters_arn: str | None, of_manager: Sequence[str], key_arn: str, *, writes: bool
) -> list[dict[str, Any]]:
    """Statements that let the secrets of runs be read, and in SSM also be written.

    A parameter is encrypted with the key that AWS manages for SSM, as the token is: see `execution`.
    """
    actions = [READ_PARAMETERS, *([PUT_PARAMETER, DELETE_PARAMETERS] if writes else [])]
    parameters = [_allow(actions, parameters_arn)] if parameters_arn else []
    if not of_manager:
        return parameters
    read = [_allow(["secretsmanager:GetSecretValue"], each) for each in of_manager]
    return [*parameters, *read, *_use_key(key_arn, ["kms:Decrypt"], "secretsmanager")]


def _use_key(key_arn: str, actions: list[str], *services: str) -> list[dict[str, Any]]:
    """The statement that lets a KMS key be used through these services of its region alone."""
    if not key_arn:
        return []
    region = key_arn.split(":")[3]
    through = {"StringLike": {"kms:ViaService": [f"{service}.{region}.amazonaws.*" for service in services]}}
    return [{**_allow(actions, key_arn), "Condition": through}]


def _read(partition: str, source: str) -> list[dict[str, Any]]:
    """Statements that let a bucket be read, or what is below a prefix of it."""
    bucket, _, prefix = source.strip("/").partition("/")
    arn = f"arn:{partition}:s3:::{bucket}"
    objects = [f"{arn}/{prefix}", f"{arn}/{prefix}/*"] if prefix else [f"{arn}/*"]
    return [_listing(arn, prefix), *(_allow(["s3:GetObject"], each) for each in objects)]


def _listing(bucket_arn: str, prefix: str) -> dict[str, Any]:
    """The statement that lets a bucket be listed, below a prefix if there is one."""
    listing = _allow(["s3:ListBucket"], bucket_arn)
    if prefix:
        listing["Condition"] = {"StringLikeIfExists": {"s3:prefix": [prefix, f"{prefix}/*"]}}
    return listing


def _publish(metrics_namespace: str | None) -> list[dict[str, Any]]:
    """The statement that lets metrics be put into one CloudWatch namespace."""
    if metrics_namespace is None:
        return []
    put = _allow(["cloudwatch:PutMetricData"], "*")
    return [{**put, "Condition": {"StringEquals": {"cloudwatch:namespace": metrics_namespace}}}]


def _pull(partition: str, image_uri: str) -> list[dict[str, Any]]:
    """Statements that let an image be pulled from a private ECR repository; other registries take none."""
    image = ECR_IMAGE.match(image_uri)
    if image is None:
        return []
    repository = f"arn:{partition}:ecr:{image['region']}:{image['account']}:repository/{image['name']}"
    return [
        _allow(["ecr:GetAuthorizationToken"], "*"),
        _allow(["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], repository),
    ]


def _allow(actions: list[str], resource: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _policy(*statements: dict[str, Any]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}
