"""The IAM role of one component's instances or tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.references import AccountRules
from infra.tags import tags


def make_role(
    name: str,
    trust: policies.Policy,
    rules: AccountRules,
    parent: pulumi.Resource,
    more_tags: Mapping[str, str] | None = None,
) -> aws.iam.Role:
    """Make a role with a trust policy, and without any rights yet."""
    return aws.iam.Role(
        name,
        assume_role_policy=json.dumps(trust),
        path=rules.role_path,
        permissions_boundary=rules.permissions_boundary or None,
        # Its policies go with the role.
        force_detach_policies=True,
        tags={**tags(name), **(more_tags or {})},
        opts=pulumi.ResourceOptions(parent=parent),
    )
