"""Pre-flight checks of a stack that is up: its account, region, roles and network, and the state that owns it.

A Pulumi program can't read its stack's state, except for the outputs of its resources. So these checks use the keepers
of a RandomId, which keep the values of the first `pulumi up` even if the stack is renamed, and the tags of deployed
resources, which also reveal a stack of this name in another state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.config.location import Caller, Remembered, wrong_account
from infra.config.settings import Settings
from infra.errors import SettingError, error_reason
from infra.tags import HEAD_ROLE, REGION_TAG, stack_tags
from infra.types import ExistingNetwork, Location

# Pulumi's auto-naming appends a hyphen and seven hexadecimal digits to a logical name.
# https://www.pulumi.com/docs/iac/concepts/resources/names/
RANDOM_END = "-[0-9a-f]{7}"
DESTROY = "change it back, or `pulumi destroy` first"


def identity(settings: Settings, location: Location, network: ExistingNetwork | None) -> dict[str, str]:
    """Values that can't change while a stack is up; Outputs, which can't be compared, are left out."""
    values = {
        "account": location.account,
        "region": location.region,
        "rolePath": settings.role_path,
        "permissionsBoundary": settings.permissions_boundary,
        "bucketName": settings.bucket_name,
        "zones": "" if location.existing else " ".join(location.zones),
    }
    if not network:
        values["vpcId"] = settings.vpc_id
        # The CIDR block of an existing VPC is not the stack's.
        values["vpcCidr"] = "" if settings.vpc_id else settings.vpc_cidr
    return _known(values)


def _known(values: Mapping[str, pulumi.Input[str]]) -> dict[str, str]:
    return {key: value for key, value in values.items() if isinstance(value, str)}


def check_roles(settings: Settings, caller: Caller, prefix: str, opts: pulumi.InvokeOptions | None = None) -> None:
    """Compare region, role path and permissions boundary with the head's role of a deployed stack.

    IAM roles are global, so this also finds the stack in another region.

    Raises:
        RunError: The stack is up in another region.
        SettingError: The role path or the permissions boundary differs.
    """
    try:
        names = aws.iam.get_roles(name_regex=f"^{re.escape(prefix)}-{HEAD_ROLE}{RANDOM_END}$", opts=opts).names
        roles = [aws.iam.get_role(name=name, opts=opts) for name in names]
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        pulumi.log.warn(
            f"aws:region: stacks in other regions could not be looked up (iam:ListRoles and iam:GetRole: "
            f"{error_reason(error)}); continuing"
        )
        return
    own = stack_tags()
    current = _known(
        {
            "region": caller.region,
            "rolePath": settings.role_path,
            "permissionsBoundary": settings.permissions_boundary,
        }
    )
    for role in roles:
        tags = role.tags or {}
        if own.items() <= tags.items():
            region = tags.get(REGION_TAG, caller.region)
            boundary = role.permissions_boundary or ""
            _refuse_change({"region": region, "rolePath": role.path, "permissionsBoundary": boundary}, current)


def check_state(
    cluster: pulumi.Output[str],
    made_for: pulumi.Output[Mapping[str, str]],
    current: Mapping[str, str],
    up: Remembered | None,
) -> pulumi.Output[str]:
    """Name of the cluster, after a check that the state owns the deployed stack and that its identity is unchanged.

    Args:
        cluster: Name of the cluster; known in a preview if the state owns the stack.
        made_for: Identity at the first `pulumi up`.
        current: Current identity.
        up: Deployed stack of this name, or None.

    Raises:
        RunError: While Pulumi resolves the Output.
    """

    def check_owner(name: str) -> str:
        if up is None or name == up.cluster:
            return name
        raise pulumi.RunError(
            f"stack: a stack named {up.stack} is up in this account and region, but not in this state (cluster "
            f"{up.cluster}, security group {up.group_id}); use the state that created it (`pulumi login`), rename this "
            "stack, or delete orphaned resources (docs/updates.md)"
        )

    def check_identity(name: str, previous: Mapping[str, str]) -> str:
        try:
            _refuse_change(previous, current)
        except SettingError as error:
            raise pulumi.RunError(str(error)) from error
        return name

    # In a preview, an unknown name means that this state does not own the stack: the check must run for that, too.
    owned = cluster.apply(check_owner, run_with_unknowns=up is not None)
    return pulumi.Output.all(owned, made_for).apply(lambda values: check_identity(*values))


def _refuse_change(previous: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Refuse changes that would replace the stack, or the roles and network that its instances use.

    Raises:
        RunError: Account, region or zones differ.
        SettingError: A setting differs.
    """
    changed = {key for key in current if previous.get(key, current[key]) != current[key]}
    if "account" in changed:
        raise wrong_account(current["account"], previous["account"])
    if "region" in changed:
        region = previous["region"]
        raise pulumi.RunError(
            f"aws:region: {current['region']!r}, but this stack is up in {region}; `pulumi config set aws:region "
            f"{region}`, `pulumi destroy` it there first, or rename this stack"
        )
    for key in ("rolePath", "permissionsBoundary"):
        if key in changed:
            hint = f"{DESTROY}: instances and tasks use these roles"
            raise SettingError(key, current[key], f"differs from the stack's, {previous[key] or 'none'}", hint)
    for key in ("vpcId", "vpcCidr"):
        if key in changed:
            network = previous[key] or "the VPC that it created"
            raise SettingError(key, current[key], f"differs from the stack's network, {network}", DESTROY)
    if "bucketName" in changed:
        bucket = previous["bucketName"] or "the bucket that it created"
        hint = "change it back, or copy the runs, `pulumi destroy` and deploy again"
        raise SettingError("bucketName", current["bucketName"], f"differs from the stack's bucket, {bucket}", hint)
    if "zones" in changed:
        raise pulumi.RunError(
            f"availabilityZones: the stack has subnets in {previous['zones']}, in this order, which would be replaced "
            f"by {current['zones']}: its security group was not found by its tags. If the stack was renamed, rename it "
            "back"
        )
