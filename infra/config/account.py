"""What a company's account asks for: whether it is there, and of this region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config.settings import Settings
from infra.definitions.policies import ECR_IMAGE
from infra.errors import SettingError, error_reason

# How AWS's services and the AWS provider say that something is not there.
ABSENT = ("NoSuchEntity", "NotFound", "not found", "couldn't find", "no matching", "does not exist", "can't be found")


def check(settings: Settings, region: str) -> None:
    """Refuse with a SettingError what is not there; where AWS does not tell the caller, say so and go on."""
    image = ECR_IMAGE.match(settings.image_uri)
    if image and not settings.nat_gateway and image["region"] != region:
        problem = f"leaves no way to the image in {image['region']}: endpoints are of {region} alone"
        raise SettingError("natGateway", "false", problem, f"give one in {region}, or leave natGateway at true")
    boundary, secret, key = settings.permissions_boundary, settings.registry_secret_arn, settings.kms_key_arn
    if boundary:
        _ask("permissionsBoundary", boundary, "iam:GetPolicy", lambda: aws.iam.get_policy(arn=boundary))
    if secret:
        _check_region("registrySecretArn", secret, region)
        _ask(
            "registrySecretArn",
            secret,
            "secretsmanager:DescribeSecret",
            lambda: aws.secretsmanager.get_secret(arn=secret),
        )
    if key:
        _check_region("kmsKeyArn", key, region)
        found = _ask("kmsKeyArn", key, "kms:DescribeKey", lambda: aws.kms.get_key(key_id=key))
        if found and not (found.enabled and found.key_spec == "SYMMETRIC_DEFAULT"):
            problem = f"is {found.key_state} and of type {found.key_spec}"
            raise SettingError("kmsKeyArn", key, problem, "give an enabled, symmetric key")


def _check_region(key: str, arn: str, region: str) -> None:
    if (other := arn.split(":")[3]) != region:
        raise SettingError(key, arn, f"is in {other}, and the stack in {region}", "give one of the stack's region")


def _ask(key: str, arn: str, action: str, ask: Callable[[], Any]) -> Any:
    """AWS's answer, or None where it gives none."""
    try:
        return ask()
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        reason = error_reason(error)
        if any(each.lower() in reason.lower() for each in ABSENT):
            raise SettingError(key, arn, f"could not be found ({reason})", "give one of this account") from error
        pulumi.log.warn(f"{key}: {arn} can't be looked up with {action} ({reason}); going on")
        return None
