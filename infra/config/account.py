"""Pre-flight checks of existing resources: IAM policies, secrets, KMS key, buckets and images.

A setting that names an absent or unsuitable resource is refused. If the caller lacks the permission, a warning names
it, and the program continues. Network, zones and instance types shape the plan: see location.py and plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config.args import RayClusterArgs as Settings
from infra.definitions.policies import ECR_IMAGE
from infra.definitions.sizing import ARCHITECTURE
from infra.definitions.user_data import ROOT_DEVICE
from infra.errors import SettingError, error_reason
from infra.types import known

# Error texts of AWS's services and the AWS provider for an absent resource.
ABSENT = (
    "NoSuchEntity",
    "NotFound",
    "not found",
    "couldn't find",
    "no matching",
    "does not exist",
    "can't be found",
    "empty result",
    "returned no results",
)
AUTO_SCALING_ROLE = "AWSServiceRoleForAutoScaling"
REDIRECTED = ("MovedPermanently", "PermanentRedirect", "StatusCode: 301")
# Problem and hint for an unsuitable resource, or None.
Verdict = tuple[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Question:
    """Look-up of a resource that a setting names.

    Attributes:
        key: Configuration key.
        value: Name or ARN of the resource.
        action: IAM action of the look-up.
        ask: The call; raises an exception if the resource is absent or the caller lacks the permission.
        judge: Verdict on the answer.
        hint: Way out for an absent resource.
        is_warning: True if an unsuitable resource still works.
    """

    key: str
    value: str
    action: str
    ask: Callable[[pulumi.InvokeOptions | None], Any]
    judge: Callable[[Any], Verdict] = lambda answer: None
    hint: str = "use one of this account"
    is_warning: bool = False


def check(settings: Settings, region: str, account: str, opts: pulumi.InvokeOptions | None = None) -> None:
    """Look up all resources that settings name; Outputs, whose resources do not exist yet, are skipped.

    Raises:
        SettingError: A resource is absent, unsuitable, or in another region.
    """
    _check_regions(settings, region)
    for question in [*_account(settings), *_buckets(settings, region), *_images(settings, account)]:
        answer = _answer(question, opts)
        verdict = None if answer is None else question.judge(answer)
        if verdict:
            error = SettingError(question.key, question.value, *verdict)
            if not question.is_warning:
                raise error
            pulumi.log.warn(str(error))


def _check_regions(settings: Settings, region: str) -> None:
    """Refuse ARNs and ECR images of another region."""
    arns = [
        ("registrySecretArn", known(settings.registry_secret_arn)),
        ("kmsKeyArn", known(settings.kms_key_arn)),
        *(("jobSecrets", known(arn)) for arn in settings.job_secrets),
    ]
    for key, arn in arns:
        other = arn.split(":")[3] if arn else region
        if other != region:
            raise SettingError(key, arn, f"is in {other}, but the stack is in {region}", f"use one in {region}")
    image = ECR_IMAGE.match(known(settings.image_uri))
    if image and not settings.nat_gateway and image["region"] != region:
        problem = f"leaves the image in {image['region']} unreachable: VPC endpoints lead only to {region}"
        raise SettingError("natGateway", "false", problem, f"use an image in {region}, or keep natGateway at true")


def _account(settings: Settings) -> Iterator[Question]:
    """Look-ups of IAM policies, secrets, the KMS key and the service-linked role that uses it."""
    boundary, secret = known(settings.permissions_boundary), known(settings.registry_secret_arn)
    key = known(settings.kms_key_arn)
    if boundary:
        yield Question(
            key="permissionsBoundary",
            value=boundary,
            action="iam:GetPolicy",
            ask=lambda opts: aws.iam.get_policy(arn=boundary, opts=opts),
        )
    policies = {"taskPolicyArns": settings.task_policy_arns, "instancePolicyArns": settings.instance_policy_arns}
    for name, arns in policies.items():
        for arn in filter(None, map(known, arns)):
            yield Question(
                key=name,
                value=arn,
                action="iam:GetPolicy",
                ask=lambda opts, arn=arn: aws.iam.get_policy(arn=arn, opts=opts),
                hint="use customer managed policies of this account, or AWS managed policies",
            )
    if secret:
        yield Question(
            key="registrySecretArn",
            value=secret,
            action="secretsmanager:DescribeSecret",
            ask=lambda opts: aws.secretsmanager.get_secret(arn=secret, opts=opts),
        )
    for arn in filter(None, map(known, settings.job_secrets)):
        yield Question(
            key="jobSecrets",
            value=arn,
            action="secretsmanager:DescribeSecret",
            ask=lambda opts, arn=arn: aws.secretsmanager.get_secret(arn=arn, opts=opts),
            hint="use the complete ARN of an existing secret, with the six characters at its end",
        )
    if key:
        yield Question(
            key="kmsKeyArn",
            value=key,
            action="kms:DescribeKey",
            ask=lambda opts: aws.kms.get_key(key_id=key, opts=opts),
            judge=_judge_key,
        )
        # EC2 Auto Scaling encrypts the instances' disks through its service-linked role.
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
        yield Question(
            key="kmsKeyArn",
            value=key,
            action="iam:GetRole",
            ask=lambda opts: aws.iam.get_role(name=AUTO_SCALING_ROLE, opts=opts),
            hint=(
                f"create the role {AUTO_SCALING_ROLE}: "
                "`aws iam create-service-linked-role --aws-service-name autoscaling.amazonaws.com`"
            ),
        )


def _buckets(settings: Settings, region: str) -> Iterator[Question]:
    """Look-ups of existing S3 buckets."""

    def judge(bucket_region: str) -> Verdict:
        if bucket_region == region:
            return None
        hint = f"use one in {region}, or expect charges for data transfer between regions"
        return f"is in {bucket_region}, but the stack is in {region}", hint

    if name := known(settings.bucket_name):
        yield Question(
            key="bucketName",
            value=name,
            action="s3:ListBucket",
            ask=lambda opts: _bucket_region(name, opts),
            judge=judge,
            hint="use an existing bucket, or leave it empty to create one",
        )
    for source in filter(None, map(known, settings.data_buckets)):
        bucket = source.partition("/")[0]
        yield Question(
            key="dataBuckets",
            value=source,
            action="s3:ListBucket",
            ask=lambda opts, bucket=bucket: _bucket_region(bucket, opts),
            judge=judge,
            hint="use existing buckets",
            is_warning=True,
        )


def _bucket_region(name: str, opts: pulumi.InvokeOptions | None) -> str:
    """Region of a bucket; S3 redirects requests from another region, which the provider reports as an error."""
    try:
        return aws.s3.get_bucket(bucket=name, opts=opts).bucket_region
    except Exception as error:
        if any(text in str(error) for text in REDIRECTED):
            return "another region"
        raise


def _images(settings: Settings, account: str) -> Iterator[Question]:
    """Look-ups of a training image in this account's ECR, and of AMIs."""
    image = ECR_IMAGE.match(known(settings.image_uri))
    if image and image["account"] == account:
        uri = known(settings.image_uri)
        name, _, digest = uri.partition("@")
        tag = name[image.end() :].lstrip(":") or None
        yield Question(
            key="imageUri",
            value=uri,
            action="ecr:DescribeImages",
            ask=lambda opts: aws.ecr.get_image(
                repository_name=image["name"],
                image_digest=digest or None,
                image_tag=None if digest else tag,
                region=image["region"],
                opts=opts,
            ),
            hint="push it first, or leave it empty to build docker/",
        )
    for key, ami in (("headAmiId", settings.head_ami_id), ("workerAmiId", settings.worker_ami_id)):
        if ami:
            yield Question(
                key=key,
                value=ami,
                action="ec2:DescribeImages",
                ask=lambda opts, ami=ami: _ami(ami, opts),
                judge=lambda image: _judge_ami(image, settings.root_volume_gib),
                hint="use an AMI of this region that the account can launch",
            )


def _ami(ami_id: str, opts: pulumi.InvokeOptions | None) -> aws.ec2.GetAmiResult:
    filters = [aws.ec2.GetAmiFilterArgs(name="image-id", values=[ami_id])]
    # A deprecated AMI can still be launched by its ID.
    return aws.ec2.get_ami(filters=filters, include_deprecated=True, opts=opts)


def _judge_ami(image: aws.ec2.GetAmiResult, root_volume_gib: int) -> Verdict:
    """Verdict on an AMI: architecture, root device, and a root volume no larger than rootVolumeGib."""
    if (image.architecture, image.root_device_name) != (ARCHITECTURE, ROOT_DEVICE):
        problem = f"is for {image.architecture} with root device {image.root_device_name}"
        return problem, f"use one derived from the Amazon ECS-optimized AMI: {ARCHITECTURE}, {ROOT_DEVICE}"
    sizes = {disk.device_name: int(disk.ebs.get("volume_size") or 0) for disk in image.block_device_mappings}
    size = sizes.get(ROOT_DEVICE, 0)
    if size > root_volume_gib:
        problem = f"has a root volume of {size} GiB, which must not exceed rootVolumeGib ({root_volume_gib})"
        return problem, f"raise rootVolumeGib to {size}"
    return None


def _judge_key(key: aws.kms.GetKeyResult) -> Verdict:
    if key.enabled and key.key_spec == "SYMMETRIC_DEFAULT":
        return None
    return f"is {key.key_state} and of type {key.key_spec}", "use an enabled, symmetric key"


def _answer(question: Question, opts: pulumi.InvokeOptions | None) -> Any:
    """AWS's answer, or None with a warning if the caller lacks the permission.

    Raises:
        SettingError: The resource is absent.
    """
    key, value = question.key, question.value
    try:
        return question.ask(opts)
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        reason = error_reason(error)
        if any(text.lower() in reason.lower() for text in ABSENT):
            raise SettingError(key, value, f"could not be found ({reason})", question.hint) from error
        pulumi.log.warn(f"{key}: {value} could not be looked up with {question.action} ({reason}); continuing")
        return None
