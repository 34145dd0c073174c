"""IAM roles of instances and tasks, and their managed policies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.tags import tags
from infra.types import SecurityOptions


def make_role(name: str, trust: policies.Policy, security: SecurityOptions, parent: pulumi.Resource) -> aws.iam.Role:
    """Create a role with a trust policy and no permissions."""
    return aws.iam.Role(
        name,
        assume_role_policy=json.dumps(trust),
        path=security.role_path,
        permissions_boundary=security.permissions_boundary or None,
        # IAM refuses to delete a role with policies otherwise.
        force_detach_policies=True,
        tags=tags(name),
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


def _policy_label(policy_arn: pulumi.Input[str], index: int) -> str:
    """Policy name with a hash, since two policies may differ only in their path; for an Output its index."""
    if not isinstance(policy_arn, str):
        return f"policy-{index}"
    return f"{policy_arn.rpartition('/')[2]}-{hashlib.sha256(policy_arn.encode()).hexdigest()[:8]}"
