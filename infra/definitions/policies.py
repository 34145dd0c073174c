"""IAM, bucket and endpoint policy documents, in a fixed order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray_on_ecs.contract import CLUSTERS_PREFIX

if TYPE_CHECKING:
    from infra.types import Location


Statement = Policy = dict[str, Any]

# Actions of Session Manager's agent, which replace SSH and an open port. AWS's AmazonSSMManagedInstanceCore would also
# let every user with a session read all parameters of the account.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
SESSION_MANAGER = (
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
# A job that waits for workers reads the launch failures of their Auto Scaling group.
LOOK_AT_GROUPS = ("autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities")
SPOT_PRICES = "ec2:DescribeSpotPriceHistory"
# Start, end and use of a reservation. IAM knows no resource of the call.
LOOK_AT_RESERVATIONS = "ec2:DescribeCapacityReservations"
# It also reads why ECS starts no task. The first ones are restricted by a condition on the cluster.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelasticcontainerservice.html
LOOK_AT_CLUSTER = (
    *("ecs:DescribeContainerInstances", "ecs:DescribeServices", "ecs:DescribeTasks", "ecs:ListServices"),
    "ecs:ListTasks",
)
LOOK_AT_INSTANCES = ("ecs:DescribeCapacityProviders", "ecs:ListContainerInstances")
# A worker whose GPUs fail marks its instance unhealthy, so that Auto Scaling replaces it.
LOOK_AT_INSTANCE = ("autoscaling:DescribeAutoScalingInstances", "autoscaling:DescribeAutoScalingGroups")
MARK_UNHEALTHY = "autoscaling:SetInstanceHealth"
# The ECS agent calls it with the task role of the protected task.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-scale-in-protection-endpoint.html
PROTECT_TASK = "ecs:UpdateTaskProtection"
# Numbers of workers.
SET_COUNT, SET_CAPACITY = "ecs:UpdateService", "autoscaling:SetDesiredCapacity"
END_INSTANCE = "autoscaling:TerminateInstanceInAutoScalingGroup"
ATTACH = "ec2:AttachNetworkInterface"
# Secrets of runs in SSM Parameter Store.
READ_PARAMETERS = "ssm:GetParameters"
PUT_PARAMETER, DELETE_PARAMETERS = "ssm:PutParameter", "ssm:DeleteParameters"
# A parameter of the advanced tier, which an account can have as its default, takes a data key.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/secure-string-parameter-kms-encryption.html
WRITE_SECRETS = ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"]
# Actions of the ECS agent on its cluster and its instance. AWS's AmazonEC2ContainerServiceforEC2Role allows them in
# every cluster of the account, and all of ECR and CloudWatch Logs, which only the execution role has here.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelasticcontainerservice.html
AGENT_OF_CLUSTER = (
    "ecs:RegisterContainerInstance",
    "ecs:DeregisterContainerInstance",
    "ecs:SubmitAttachmentStateChanges",
    "ecs:SubmitContainerStateChange",
    "ecs:SubmitTaskStateChange",
)
AGENT_OF_INSTANCE = ("ecs:Poll", "ecs:StartTelemetrySession", "ecs:UpdateContainerInstancesState")
PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
PUSH = ("ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart")
# AWS's buckets that instances read without the account's credentials: image layers, Amazon Linux packages, and files of
# Systems Manager for its agent and patches.
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
# 123456789012.dkr.ecr.us-west-2.amazonaws.com/name, the dual-stack 123456789012.dkr-ecr.us-west-2.on.aws/name, and both
# forms in other partitions and with FIPS.
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)"
    r"\.(amazonaws\.(com|com\.cn|eu)|on\.aws|on\.amazonwebservices\.(com\.cn|eu))/(?P<name>[^:@]+)"
)


def assumed_by(service: str, **conditions: dict[str, str]) -> Policy:
    """Trust policy of a role for one AWS service, e.g. ecs-tasks.amazonaws.com."""
    statement: Statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    if conditions:
        statement["Condition"] = conditions
    return _policy(statement)


def assumed_for(service: str, source_arn: str) -> Policy:
    """Trust policy of a role that a service assumes only for resources of one account and region.

    A project of CodeBuild keeps its physical name when its component is renamed, so `source_arn` is without a name.
    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-iam-roles.html
    https://docs.aws.amazon.com/codebuild/latest/userguide/cross-service-confused-deputy-prevention.html
    """
    account = source_arn.split(":")[4]
    return assumed_by(service, ArnLike={"aws:SourceArn": source_arn}, StringEquals={"aws:SourceAccount": account})


def image_build(*, repository_arn: str, source_arn: str, bucket_arn: str, log_group_arn: str, keys_arn: str) -> Policy:
    """Policy of the image's build: read its source, pull and push this repository's images, and write its log.

    An existing bucket may have any key by default, so the context says what the key decrypts: an object, or with an S3
    Bucket Key its bucket. https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html#encryption-context
    """
    [decrypt] = _use_key(keys_arn, ["kms:Decrypt"], "s3")
    decrypt["Condition"]["StringLike"]["kms:EncryptionContext:aws:s3:arn"] = [source_arn, bucket_arn]
    return _policy(
        _allow(["s3:GetObject"], source_arn),
        decrypt,
        _allow(["ecr:GetAuthorizationToken"], "*"),
        _allow([*PULL, *PUSH], repository_arn),
        _allow(["logs:CreateLogStream", "logs:PutLogEvents"], f"{log_group_arn}:*"),
    )


def ecs_agent(cluster_arn: str) -> Policy:
    """Policy of the ECS agent, which registers its instance with this cluster and reports its tasks."""
    instances = cluster_arn.partition(":cluster/")[0] + ":container-instance/*"
    in_cluster = {"ArnEquals": {"ecs:cluster": cluster_arn}}
    return _policy(
        _allow(list(AGENT_OF_CLUSTER), cluster_arn),
        {**_allow(list(AGENT_OF_INSTANCE), instances), "Condition": in_cluster},
        _allow(["ecs:DiscoverPollEndpoint"], "*"),
    )


def session_manager(instances_arn: str) -> Policy:
    """Policy of an instance for sessions with Session Manager."""
    return _policy(_allow(["ssm:UpdateInstanceInformation"], instances_arn), _allow(list(SESSION_MANAGER), "*"))


def mounted(partition: str, sources: Sequence[str], kms_key_arn: str = "", efs_arn: str = "") -> Policy:
    """Policy of an instance that mounts folders of S3, each `bucket` or `bucket/prefix`, and EFS: these alone."""
    of_s3 = [*_read(partition, sources), *_use_key(kms_key_arn, ["kms:Decrypt"], "s3")] if sources else []
    clients = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    return _policy(*of_s3, *([_allow(clients, efs_arn)] if efs_arn else []))


def nat_instance(*, interface_arn: str, profile_arn: str) -> Policy:
    """Policy of the NAT instance: attach this interface, to an instance with its instance profile.

    The call needs both resources.
    https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
    """
    instances = interface_arn.partition(":network-interface/")[0] + ":instance/*"
    of_profile = {"ArnEquals": {"ec2:InstanceProfile": profile_arn}}
    return _policy(_allow([ATTACH], interface_arn), {**_allow([ATTACH], instances), "Condition": of_profile})


def execution(
    *,
    partition: str,
    image_uri: str,
    log_group_arn: str,
    token_arn: str,
    registry_secret_arn: str = "",
    kms_key_arn: str = "",
) -> Policy:
    """Policy of an execution role: pull the image, write logs, read the Ray token.

    By default the token is encrypted with the AWS managed key for SSM, whose key policy lets the account's principals
    decrypt through SSM. So kms:Decrypt is required only for a customer managed key.
    """
    secret = [_allow(["secretsmanager:GetSecretValue"], registry_secret_arn)] if registry_secret_arn else []
    pull = []
    if image := ECR_IMAGE.match(image_uri):  # other registries need no statement
        repository = f"arn:{partition}:ecr:{image['region']}:{image['account']}:repository/{image['name']}"
        pull = [_allow(["ecr:GetAuthorizationToken"], "*"), _allow(list(PULL), repository)]
    return _policy(
        *pull,
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
    cluster_arn: str | None = None,
    own_group_arn: str | None = None,
    in_block: bool = False,
    data_buckets: Sequence[str] = (),
    secrets_arn: str | None = None,
    writes_secrets: bool = False,
    job_secrets: Sequence[str] = (),
    kms_key_arn: str = "",
) -> Policy:
    """Policy of a task role: read and write the stack's bucket but for requests, and use the given resources.

    The whole bucket, since a cluster is one trust domain and a Ray program may store checkpoints anywhere in it.

    A task protects itself from scale-in (`tasks_arn`), and can have its instance replaced (`own_group_arn`). The
    parameter of ClusterInfo comes with read access to Auto Scaling groups, spot prices and capacity reservations, the
    cluster with that to its services, tasks and instances. A worker `in_block` reads the end of its Capacity Block.
    `secrets_arn` are SSM parameters with the secrets of runs, and `job_secrets` those of Secrets Manager. Data buckets
    are `bucket` or `bucket/prefix`.
    """
    statements: list[Statement] = [
        _allow(["s3:ListBucket"], bucket_arn),
        _allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], f"{bucket_arn}/*"),
        # Only people request runs; their policies name the folder of each user.
        {"Effect": "Deny", "Action": ["s3:PutObject"], "Resource": f"{bucket_arn}/{CLUSTERS_PREFIX}/*/requests/*"},
        *_use_key(kms_key_arn, ["kms:Decrypt", "kms:GenerateDataKey"], "s3"),
        *_read(partition, data_buckets),
    ]
    if tasks_arn:
        statements.append(_allow([PROTECT_TASK], tasks_arn))
    if parameter_arn:
        statements.append(_allow(["ssm:GetParameter"], parameter_arn))
        statements.append(_allow([*LOOK_AT_GROUPS, LOOK_AT_RESERVATIONS, SPOT_PRICES], "*"))
    if cluster_arn:
        here = cluster_arn.partition(":cluster/")[0]
        in_cluster = {"ArnEquals": {"ecs:cluster": cluster_arn}}
        statements.append({**_allow(list(LOOK_AT_CLUSTER), "*"), "Condition": in_cluster})
        statements.append(_allow(list(LOOK_AT_INSTANCES), [cluster_arn, f"{here}:capacity-provider/*"]))
    if in_block:
        statements.append(_allow([LOOK_AT_RESERVATIONS], "*"))
    if own_group_arn:
        statements.append(_allow(list(LOOK_AT_INSTANCE), "*"))
        statements.append(_allow([MARK_UNHEALTHY], own_group_arn))
    statements += _secrets(secrets_arn, job_secrets, kms_key_arn, writes=writes_secrets)
    if metrics_namespace is not None:
        in_namespace = {"StringEquals": {"cloudwatch:namespace": metrics_namespace}}
        statements.append({**_allow(["cloudwatch:PutMetricData"], "*"), "Condition": in_namespace})
    return _policy(*statements)


def scaling(*, cluster_arn: str, service_name: str, group_arn: str) -> Policy:
    """Policy of the head for one kind of worker: set the numbers of its service and its group, and end its instances.

    UpdateService could also roll the service back to an earlier task definition of the cluster, whose roles the head
    may not pass; the head and its workers are one trust domain.
    """
    of_cluster, _, name = cluster_arn.partition(":cluster/")
    return _policy(
        _allow([SET_COUNT], f"{of_cluster}:service/{name}/{service_name}"),
        _allow([SET_CAPACITY, END_INSTANCE], group_arn),
    )


def tls_only(*, bucket_arn: str) -> Policy:
    """Bucket policy that denies requests without TLS."""
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
    """Default policy of VPC endpoints: full access."""
    return _policy({"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"})


def endpoint(account: str) -> Policy:
    """Policy of a VPC endpoint for principals of this account, so that no data leaves with other credentials."""
    own_account = {"StringEquals": {"aws:PrincipalAccount": account}}
    return _policy({"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*", "Condition": own_account})


def s3_endpoint(location: Location) -> Policy:
    """Policy of the S3 endpoint for principals of this account, and for anonymous reads of AWS's buckets.

    Buckets of other accounts remain accessible to this account's roles, as far as their policies allow.
    """
    buckets = [f"arn:{location.partition}:s3:::{name.format(region=location.region)}/*" for name in BUCKETS_OF_AWS]
    read: Statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": buckets}
    return _policy(*endpoint(location.account)["Statement"], read)


def _secrets(parameters_arn: str | None, secret_arns: Sequence[str], key_arn: str, *, writes: bool) -> list[Statement]:
    """Statements to read the secrets of runs, and with `writes` to create and delete those in SSM.

    By default the parameters are encrypted with the AWS managed key for SSM, like the token: see `execution`.
    """
    statements: list[Statement] = []
    if parameters_arn:
        actions = [READ_PARAMETERS, PUT_PARAMETER, DELETE_PARAMETERS] if writes else [READ_PARAMETERS]
        statements.append(_allow(actions, parameters_arn))
        statements += _use_key(key_arn, WRITE_SECRETS if writes else ["kms:Decrypt"], "ssm")
    if secret_arns:
        statements.append(_allow(["secretsmanager:GetSecretValue"], list(secret_arns)))
        statements += _use_key(key_arn, ["kms:Decrypt"], "secretsmanager")
    return statements


def _use_key(key_arn: str, actions: list[str], *services: str) -> list[Statement]:
    """Statement to use a KMS key only through these services in its region."""
    if not key_arn:
        return []
    region = key_arn.split(":")[3]
    via_service = {"StringLike": {"kms:ViaService": [f"{service}.{region}.amazonaws.*" for service in services]}}
    return [{**_allow(actions, key_arn), "Condition": via_service}]


def _read(partition: str, sources: Sequence[str]) -> list[Statement]:
    """Statements to read buckets, or prefixes of them: few and short, since IAM limits a role's policies.

    Two requests have no prefix: HeadBucket, and S3's check whether it may answer 404 instead of 403 for a missing key.
    PyArrow needs both, hence StringLikeIfExists.
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html
    """
    keys: dict[str, list[str]] = {}
    for source in sources:
        bucket, _, prefix = source.strip("/").partition("/")
        keys.setdefault(f"arn:{partition}:s3:::{bucket}", []).extend([prefix, f"{prefix}/*"] if prefix else ["*"])
    objects = [f"{arn}/{key}" for arn, some in keys.items() for key in some]
    whole = [arn for arn, some in keys.items() if "*" in some]
    parts: list[Statement] = [
        {**_allow(["s3:ListBucket"], arn), "Condition": {"StringLikeIfExists": {"s3:prefix": some}}}
        for arn, some in keys.items()
        if arn not in whole
    ]
    whole_buckets = [_allow(["s3:ListBucket"], whole)] if whole else []
    return [_allow(["s3:GetObject"], objects), *whole_buckets, *parts] if objects else []


def _allow(actions: list[str], resource: str | list[str]) -> Statement:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _policy(*statements: Statement) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}
