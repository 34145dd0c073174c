"""The IAM role of one component's instances or tasks."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.references import AccountRules
from infra.tags import tags


def make_role(name: str, trust: policies.Policy, rules: AccountRules, parent: pulumi.Resource) -> aws.iam.Role:
    """Make a role with a trust policy, and without any rights yet."""
    return aws.iam.Role(
        name,
        assume_role_policy=json.dumps(trust),
        path=rules.role_path,
        permissions_boundary=rules.permissions_boundary or None,
        tags=tags(name),
        opts=pulumi.ResourceOptions(parent=parent),
    )
