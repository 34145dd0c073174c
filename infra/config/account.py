"""Questions to AWS about the settings, in one table, asked before anything is made.

A setting that names something which is absent or unfit is refused. Where AWS does not tell the caller, a warning names
the permission that is missing, and the program goes on. Network, zones and instance types, whose answers shape the
stack, are asked in location.py and plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config.settings import Settings
from infra.definitions.policies import ECR_IMAGE
from infra.definitions.sizing import ARCHITECTURE
from infra.definitions.user_data import ROOT_DEVICE
from infra.errors import SettingError, error_reason
from infra.references import known

# How AWS's services and the AWS provider say that something is not there.
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
# Problem and way out of an answer that is unfit; None of one that fits.
Verdict = tuple[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question to AWS about what a setting names.

    Attributes:
        key: The setting.
        value: What it names.
        action: IAM action that the answer needs.
        ask: Function that asks by a provider; it raises where AWS has no answer.
        judge: Function that judges the answer.
        hint: Way out where it is absent.
        is_warning: True if what is unfit works all the same.
    """

    key: str
    value: str
    action: str
    ask: Callable[[pulumi.InvokeOptions | None], Any]
    judge: Callable[[Any], Verdict] = lambda answer: None
    hint: str = "give one of this account"
    is_warning: bool = False


def check(settings: Settings, region: str, account: str, opts: pulumi.InvokeOptions | None = None) -> None:
    """Ask all questions, by the provider of `opts`. An Output is not there yet, so AWS isn't asked about it.

    Raises:
        SettingError: A setting names what is absent, unfit, or in another region.
    """
    _check_regions(settings, region)
    for question in [*_companys(settings), *_buckets(settings, region), *_images(settings, account)]:
        answer = _answer(question, opts)
        if answer is not None and (verdict := question.judge(answer)):
            error = SettingError(question.key, question.value, *verdict)
            if not question.is_warning:
                raise error
            pulumi.log.warn(str(error))


def _check_regions(settings: Settings, region: str) -> None:
    """Refuse ARNs and images whose own text names another region."""
    secret, kms_key = known(settings.registry_secret_arn), known(settings.kms_key_arn)
    of_jobs = [("jobSecrets", known(arn)) for arn in settings.job_secrets]
    for key, arn in (("registrySecretArn", secret), ("kmsKeyArn", kms_key), *of_jobs):
        if arn and (other := arn.split(":")[3]) != region:
            raise SettingError(key, arn, f"is in {other}, and the stack in {region}", "give one of the stack's region")
    image = ECR_IMAGE.match(known(settings.image_uri))
    if image and not settings.nat_gateway and image["region"] != region:
        problem = f"leaves no way to the image in {image['region']}: endpoints are of {region} alone"
        raise SettingError("natGateway", "false", problem, f"give one in {region}, or leave natGateway at true")


def _companys(settings: Settings) -> Iterator[Question]:
    """Questions about what a company gives for its account, and about the roles that AWS's services need in it."""
    boundary, secret = known(settings.permissions_boundary), known(settings.registry_secret_arn)
    key = known(settings.kms_key_arn)
    if boundary:
        yield Question(
            key="permissionsBoundary",
            value=boundary,
            action="iam:GetPolicy",
            ask=lambda opts: aws.iam.get_policy(arn=boundary, opts=opts),
        )
    given = {"taskPolicyArns": settings.task_policy_arns, "instancePolicyArns": settings.instance_policy_arns}
    for name, arns in given.items():
        for arn in filter(None, map(known, arns)):
            yield Question(
                key=name,
                value=arn,
                action="iam:GetPolicy",
                ask=lambda opts, arn=arn: aws.iam.get_policy(arn=arn, opts=opts),
                hint="give policies of this account, or of AWS",
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
            hint="give the ARN of one that exists, with the six characters at its end",
        )
    if key:
        yield Question(
            key="kmsKeyArn",
            value=key,
            action="kms:DescribeKey",
            ask=lambda opts: aws.kms.get_key(key_id=key, opts=opts),
            judge=_judge_key,
        )
        # Auto Scaling encrypts the instances' disks with it.
        yield Question(
            key="kmsKeyArn",
            value=key,
            action="iam:GetRole",
            ask=lambda opts: aws.iam.get_role(name=AUTO_SCALING_ROLE, opts=opts),
            hint=(
                f"make the role {AUTO_SCALING_ROLE}: "
                "`aws iam create-service-linked-role --aws-service-name autoscaling.amazonaws.com`"
            ),
        )


def _buckets(settings: Settings, region: str) -> Iterator[Question]:
    """Questions about buckets that exist."""

    def judge(there: str) -> Verdict:
        hint = f"give one in {region}, or expect to pay for each byte that passes between the regions"
        return (f"is in {there}, and the stack in {region}", hint) if there != region else None

    if name := known(settings.bucket_name):
        yield Question(
            key="bucketName",
            value=name,
            action="s3:ListBucket",
            ask=lambda opts: _bucket_region(name, opts),
            judge=judge,
            hint="give one that exists, or leave it empty for a bucket of the stack's own",
        )
    for source in filter(None, map(known, settings.data_buckets)):
        bucket = source.partition("/")[0]
        yield Question(
            key="dataBuckets",
            value=source,
            action="s3:ListBucket",
            ask=lambda opts, bucket=bucket: _bucket_region(bucket, opts),
            judge=judge,
            hint="give buckets that exist",
            is_warning=True,
        )


def _bucket_region(name: str, opts: pulumi.InvokeOptions | None) -> str:
    """Ask for a bucket's region; S3 redirects a request of another region, and the provider takes that for an error."""
    try:
        return aws.s3.get_bucket(bucket=name, opts=opts).bucket_region
    except Exception as error:
        if any(each in str(error) for each in REDIRECTED):
            return "another region"
        raise


def _images(settings: Settings, account: str) -> Iterator[Question]:
    """Questions about the training image in this account's ECR, and about machine images."""
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
                ask=lambda opts, ami=ami: _machine_image(ami, opts),
                judge=lambda found: _judge_machine_image(found, settings.root_volume_gib),
                hint="give one of this region that the account may use",
            )


def _machine_image(ami_id: str, opts: pulumi.InvokeOptions | None) -> aws.ec2.GetAmiResult:
    filters = [aws.ec2.GetAmiFilterArgs(name="image-id", values=[ami_id])]
    return aws.ec2.get_ami(filters=filters, include_deprecated=True, opts=opts)


def _judge_machine_image(found: aws.ec2.GetAmiResult, root_volume_gib: int) -> Verdict:
    """Refuse an image that the instances can't start from."""
    if (found.architecture, found.root_device_name) != (ARCHITECTURE, ROOT_DEVICE):
        problem = f"is for {found.architecture} with its root disk at {found.root_device_name}"
        return problem, f"give one made from AWS's for ECS: {ARCHITECTURE}, {ROOT_DEVICE}"
    disks = {each.device_name: int(each.ebs.get("volume_size") or 0) for each in found.block_device_mappings}
    if (size := disks.get(ROOT_DEVICE, 0)) > root_volume_gib:
        return (
            f"has a root disk of {size} GiB, and rootVolumeGib is {root_volume_gib}",
            f"raise rootVolumeGib to {size}",
        )
    return None


def _judge_key(found: aws.kms.GetKeyResult) -> Verdict:
    if found.enabled and found.key_spec == "SYMMETRIC_DEFAULT":
        return None
    return f"is {found.key_state} and of type {found.key_spec}", "give an enabled, symmetric key"


def _answer(question: Question, opts: pulumi.InvokeOptions | None) -> Any:
    """Return AWS's answer, or None where AWS does not tell the caller.

    Raises:
        SettingError: It is absent.
    """
    key, value = question.key, question.value
    try:
        return question.ask(opts)
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        reason = error_reason(error)
        if any(each.lower() in reason.lower() for each in ABSENT):
            raise SettingError(key, value, f"could not be found ({reason})", question.hint) from error
        pulumi.log.warn(f"{key}: {value} can't be looked up with {question.action} ({reason}); going on")
        return None
