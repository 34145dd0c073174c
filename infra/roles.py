"""IAM roles of instances and tasks, their managed policies, and the right of AWS's roles to the disks' KMS key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.types import Location, SecurityOptions

AUTO_SCALING_ROLE = "autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
DISK_KEY_OPERATIONS = [
    "Encrypt",
    "Decrypt",
    "ReEncryptFrom",
    "ReEncryptTo",
    "GenerateDataKey",
    "GenerateDataKeyWithoutPlaintext",
    "DescribeKey",
    "CreateGrant",
]


def make_role(name: str, trust: policies.Policy, security: SecurityOptions, parent: pulumi.Resource) -> aws.iam.Role:
    """Create a role with a trust policy and no permissions."""
    return aws.iam.Role(
        name,
        assume_role_policy=json.dumps(trust),
        path=security.role_path,
        permissions_boundary=security.permissions_boundary or None,
        # IAM refuses to delete a role with policies otherwise.
        force_detach_policies=True,
        opts=pulumi.ResourceOptions(parent=parent),
    )


def attach_policies(
    name: str, role: aws.iam.Role, policy_arns: Sequence[pulumi.Input[str]], parent: pulumi.Resource
) -> list[pulumi.Resource]:
    """Attach existing managed policies to a role."""
    return [
        aws.iam.RolePolicyAttachment(
            f"{name}-{_policy_label(arn, index)}",
            role=role.name,
            policy_arn=arn,
            opts=pulumi.ResourceOptions(parent=parent),
        )
        for index, arn in enumerate(policy_arns)
    ]


def grant_disk_key(
    name: str, key_arn: pulumi.Input[str], service_role: str, location: Location, parent: pulumi.Resource
) -> aws.kms.Grant:
    """KMS grant by which a service-linked role that launches instances encrypts their disks."""
    return aws.kms.Grant(
        name,
        key_id=key_arn,
        grantee_principal=f"arn:{location.partition}:iam::{location.account}:role/aws-service-role/{service_role}",
        operations=DISK_KEY_OPERATIONS,
        opts=pulumi.ResourceOptions(parent=parent),
    )


def _policy_label(policy_arn: pulumi.Input[str], index: int) -> str:
    """Policy name with a hash, since two policies may differ only in their path; for an Output its index."""
    if not isinstance(policy_arn, str):
        return f"policy-{index}"
    return f"{policy_arn.rpartition('/')[2]}-{hashlib.sha256(policy_arn.encode()).hexdigest()[:8]}"
