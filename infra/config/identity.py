"""Pre-flight checks of a stack that is up: its region, its roles and the state that owns it.

A program can't read its stack's state, so these checks go by the tags of what is up.
"""

from __future__ import annotations

import re

import pulumi
import pulumi_aws as aws

from infra.config.location import Remembered
from infra.config.settings import Settings
from infra.errors import SettingError, error_reason
from infra.tags import HEAD_ROLE, REGION_TAG

# Pulumi puts a hyphen and seven hexadecimal digits behind a logical name.
RANDOM_END = "-[0-9a-f]{7}"


def check_roles(settings: Settings, region: str, prefix: str) -> None:
    """Refuse another region, role path or permissions boundary than those of the stack that is up.

    A role's path and boundary can't change while instances have it: Pulumi would delete the old role under them.

    Raises:
        RunError: The stack is up in another region.
        SettingError: The role path or the permissions boundary differs.
    """
    try:
        found = aws.iam.get_roles(name_regex=f"^{re.escape(prefix)}-{HEAD_ROLE}{RANDOM_END}$")
        roles = [aws.iam.get_role(name=each) for each in found.names]
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        what = f"can't be asked whether the stack is up in another region (iam:ListRoles: {error_reason(error)})"
        pulumi.log.warn(f"aws:region: IAM {what}; going on")
        return
    own = {"project": pulumi.get_project(), "stack": pulumi.get_stack()}
    for role in roles:
        tags = role.tags or {}
        if not own.items() <= tags.items():
            continue
        if (there := tags.get(REGION_TAG, region)) != region:
            raise pulumi.RunError(
                f"aws:region: {region!r}, and stack {own['stack']} is up in {there} (role {role.name}); `pulumi config "
                f"set aws:region {there}`, `pulumi destroy` it there first, or give this stack another name"
            )
        hint = "change it back, or `pulumi destroy` first: its instances and tasks have these roles"
        if role.path != settings.role_path:
            raise SettingError("rolePath", settings.role_path, f"differs from the stack's, {role.path}", hint)
        if (role.permissions_boundary or "") != settings.permissions_boundary:
            problem = f"differs from the stack's, {role.permissions_boundary or 'none'}"
            raise SettingError("permissionsBoundary", settings.permissions_boundary, problem, hint)


def check_owner(cluster: pulumi.Output[str], up: Remembered | None) -> pulumi.Output[str]:
    """The cluster's name, once it is certain that the stack that is up is the one in this state.

    A state that has the stack knows its cluster's name in a preview, too. In another state it is unknown or different.

    Raises:
        RunError: When the output is awaited, if another state owns the stack that is up.
    """
    if up is None:
        return cluster

    def check(name: str) -> str:
        if name == up.cluster:
            return name
        raise pulumi.RunError(
            f"stack: a stack of the name {up.stack} is up in this account and region, and this state does not have it "
            f"(cluster {up.cluster}, security group {up.group_id}); use the state that made it (`pulumi login`), give "
            "this stack another name, or delete what is left of a lost one (docs/stack.md)"
        )

    return cluster.apply(check, run_with_unknowns=True)
