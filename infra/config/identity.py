"""Pre-flight checks of a stack that is up: its account, region, roles and network, and the state that owns it.

A program can't read its stack's state, but for the outputs of its own resources. So these checks go by the keepers of a
RandomId, which keep the values of the first `up`, also when the stack is renamed; and by the tags of what is up, which
also tell of a stack of this name in another state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.config.location import Caller, Remembered, wrong_account
from infra.config.settings import Settings
from infra.errors import SettingError, error_reason
from infra.references import ExistingNetwork, Location
from infra.tags import HEAD_ROLE, REGION_TAG, stack_tags

# Pulumi puts a hyphen and seven hexadecimal digits behind a logical name.
RANDOM_END = "-[0-9a-f]{7}"
DESTROY = "change it back, or `pulumi destroy` first"


def identity(settings: Settings, location: Location, network: ExistingNetwork | None) -> dict[str, str]:
    """Everything that can't change while a stack is up, without Outputs, which can't be compared."""
    own_network = {} if network else {"vpcId": settings.vpc_id, "vpcCidr": "" if settings.vpc_id else settings.vpc_cidr}
    return _known(
        {
            "account": location.account,
            "region": location.region,
            "rolePath": settings.role_path,
            "permissionsBoundary": settings.permissions_boundary,
            "bucketName": settings.bucket_name,
            **own_network,
            "zones": "" if location.existing else " ".join(location.zones),
        }
    )


def _known(values: Mapping[str, pulumi.Input[str]]) -> dict[str, str]:
    return {key: value for key, value in values.items() if isinstance(value, str)}


def check_roles(settings: Settings, caller: Caller, prefix: str, opts: pulumi.InvokeOptions | None = None) -> None:
    """Refuse another region, role path or permissions boundary than those of a stack of this name that is up.

    Raises:
        RunError: The stack is up in another region.
        SettingError: The role path or the permissions boundary differs.
    """
    try:
        found = aws.iam.get_roles(name_regex=f"^{re.escape(prefix)}-{HEAD_ROLE}{RANDOM_END}$", opts=opts)
        roles = [aws.iam.get_role(name=each, opts=opts) for each in found.names]
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        what = "can't be asked whether the stack is up in another region (iam:ListRoles and iam:GetRole"
        pulumi.log.warn(f"aws:region: IAM {what}: {error_reason(error)}); going on")
        return
    own = stack_tags()
    now = _known(
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
            _refuse_change({"region": region, "rolePath": role.path, "permissionsBoundary": boundary}, now)


def check_state(
    cluster: pulumi.Output[str],
    made_for: pulumi.Output[Mapping[str, str]],
    now: Mapping[str, str],
    up: Remembered | None,
) -> pulumi.Output[str]:
    """The cluster's name, once it is certain that this state has the stack that is up, and that the stack stays there.

    Args:
        cluster: The cluster's name; a state that has the stack knows it in a preview, too.
        made_for: The identity at the first `up`.
        now: The identity now.
        up: The stack of this name that is up, or None.

    Raises:
        RunError: When the output is awaited.
    """

    def check_owner(name: str) -> str:
        if up is None or name == up.cluster:
            return name
        raise pulumi.RunError(
            f"stack: a stack of the name {up.stack} is up in this account and region, and this state does not have it "
            f"(cluster {up.cluster}, security group {up.group_id}); use the state that made it (`pulumi login`), give "
            "this stack another name, or delete what is left of a lost one (docs/updates.md)"
        )

    def check_identity(known: tuple[str, Mapping[str, str]]) -> str:
        name, was = known
        try:
            _refuse_change(was, now)
        except SettingError as error:
            raise pulumi.RunError(str(error)) from error
        return name

    owned = cluster.apply(check_owner, run_with_unknowns=up is not None)
    return pulumi.Output.all(owned, made_for).apply(lambda known: check_identity((known[0], known[1])))


def _refuse_change(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse what would replace the stack, or take roles and network from under its instances.

    Raises:
        RunError: Account, region or zones differ.
        SettingError: A setting differs.
    """
    changed = {key for key in now if was.get(key, now[key]) != now[key]}
    if "account" in changed:
        raise wrong_account(now["account"], was["account"])
    if "region" in changed:
        there = was["region"]
        raise pulumi.RunError(
            f"aws:region: {now['region']!r}, and this stack is up in {there}; `pulumi config set aws:region {there}`, "
            "`pulumi destroy` it there first, or give this stack another name"
        )
    for key in ("rolePath", "permissionsBoundary"):
        if key in changed:
            hint = f"{DESTROY}: instances and tasks run with these roles"
            raise SettingError(key, now[key], f"differs from the stack's, {was[key] or 'none'}", hint)
    for key in ("vpcId", "vpcCidr"):
        if key in changed:
            raise SettingError(
                key, now[key], f"is another network than the stack's, {was[key] or 'its own VPC'}", DESTROY
            )
    if "bucketName" in changed:
        where = was["bucketName"] or "a bucket of its own"
        hint = "change it back, or copy the runs, `pulumi destroy` and begin anew"
        raise SettingError("bucketName", now["bucketName"], f"is another bucket than the stack's, {where}", hint)
    if "zones" in changed:
        raise pulumi.RunError(
            f"availabilityZones: the stack has subnets in {was['zones']}, in this order, and would get others, in "
            f"{now['zones']}: its security group is not found by its tags. If the stack was renamed, rename it back"
        )
