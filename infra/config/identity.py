"""Pre-flight check of a cluster that is up: its identity, which the state keeps from the first `pulumi up`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws

from infra.config.args import RayClusterArgs
from infra.config.location import wrong_account
from infra.errors import Refusal, SettingError, warn
from infra.tags import tags

if TYPE_CHECKING:
    from infra.config.plan import Plan

# Builder of the image; empty with `image_uri`, and missing in stacks of earlier versions.
BUILDER = "image_builder"
DESTROY = "change it back, or `pulumi destroy` first"
# Fields whose change would replace what instances use, and end half-way, or lose the runs.
FIXED = {
    "bucket_name": "change it back, or copy the runs, `pulumi destroy` and deploy again",
    "vpc_id": DESTROY,
    "vpc_cidr": DESTROY,
    "role_path": f"{DESTROY}: instances and tasks use these roles",
}


def identity_of(args: RayClusterArgs, plan: Plan) -> dict[str, str]:
    """Values that can't change while a cluster is up, and the builder, which can't change from CodeBuild to Docker.

    Outputs, which can't be compared, are left out.
    """
    fixed = {name: getattr(args, name) for name in FIXED}
    if plan.location.existing:
        fixed["vpc_cidr"] = ""  # the VPC's own
    known = {name: value for name, value in fixed.items() if isinstance(value, str)}
    return {"account": plan.location.account, "region": plan.location.region, **known, BUILDER: plan.image_builder}


def check_identity(
    name: pulumi.Output[str], previous: pulumi.Output[Mapping[str, str]], args: RayClusterArgs, plan: Plan
) -> pulumi.Output[str]:
    """Name of the cluster, after a check that its identity is that of the first `pulumi up`, `previous`."""
    current = identity_of(args, plan)
    if args.image_build != "auto":
        del current[BUILDER]

    def check(values: list[Any]) -> str:
        name, kept = values
        _refuse_change(kept, current)
        return name

    return pulumi.Output.all(name, previous).apply(check)


def check_new(name: pulumi.Output[str], plan: Plan, prefix: str, opts: pulumi.InvokeOptions) -> None:
    """In a preview, refuse a new cluster without an image or a network, and warn about another cluster of this name.

    A cluster that is up, whose name a preview knows, has both already, and goes on when a reservation ends. An update
    can't tell, and is only warned.
    """

    def check(name: Any) -> None:
        if isinstance(name, str):
            if plan.image_problem:
                warn(f"{plan.image_problem} (this machine could not build a changed image)")
            for ended in plan.ended:
                warn(str(ended))
            return
        _warn_of_second(prefix, opts)
        for problem in (plan.image_problem, plan.network_problem, *plan.ended):
            if problem:
                raise problem

    if pulumi.runtime.is_dry_run():
        name.apply(check, run_with_unknowns=True)
    else:
        check("")


def _refuse_change(previous: Mapping[str, str], current: Mapping[str, str]) -> None:
    changed = {key: was for key, was in previous.items() if current.get(key, was) != was}
    if "account" in changed:
        raise wrong_account(current["account"], previous["account"])
    if "region" in changed:
        region = previous["region"]
        raise Refusal(
            "aws:region",
            f"{current['region']!r}, but this stack is up in {region}; `pulumi config set aws:region {region}`, or "
            "`pulumi destroy` it there first",
        )
    if (changed.pop(BUILDER, ""), current.get(BUILDER)) == ("codebuild", "local"):
        # Docker builds the image again, with another digest, which replaces all nodes. CodeBuild in place of Docker
        # takes the image with the same tag from the repository.
        problem = "is local on this machine, but was codebuild at the first `pulumi up`"
        hint = "set image_build to codebuild for everyone who updates the stack, or to local, which replaces all nodes"
        raise SettingError("image_build", "auto", problem, hint)
    for key, was in changed.items():
        raise SettingError(key, current[key], f"differs from the cluster's, {was or 'none'}", FIXED[key])


def _warn_of_second(prefix: str, opts: pulumi.InvokeOptions) -> None:
    """Warn about a cluster of this name that another state has created."""
    try:
        groups = aws.ec2.get_security_groups(tags=tags(f"{prefix}-network-tasks-group"), opts=opts).ids
    except Exception:  # The SDK raises a bare Exception for every error of the provider.
        return
    if groups:
        warn(
            f"stack: a cluster of this name is up in this account and region, but not in this state (security group "
            f"{groups[0]}); `pulumi up` creates a second one. To update the first, use the state that created it "
            "(`pulumi login`); to end orphaned resources, see docs/updates.md"
        )
