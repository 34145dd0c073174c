"""Name prefix of a cluster's resources, and the tags that they share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import pulumi
import pulumi_aws as aws

# IAM's limit of 64 characters, minus the longest suffix of a role ("-worker-task-execution") and Pulumi's ("-1a2b3c4").
# The limit of 63 for buckets and DNS labels leaves more.
LONGEST_PREFIX = 34
# The longest prefix with a kind of node, before "-instance-role-1a2b3c4".
LONGEST_KIND = 42
HASH_LENGTH = 8
# Prefixes that AWS reserves in names of capacity providers, parameters, documents, security groups or buckets.
RESERVED = ("amazon", "aws", "ecs", "fargate", "ssm", "sg-", "amzn", "xn--", "sthree-")

TAG_PREFIX = "ray-on-ecs:"
PROJECT_TAG, STACK_TAG = f"{TAG_PREFIX}project", f"{TAG_PREFIX}stack"
# Of the service of a head that sleeps: without it, an update can't tell that the sleep has been switched off.
SLEEP_TAG = f"{TAG_PREFIX}sleeps"


def tags(name: str) -> dict[str, str]:
    """Tags of one resource: project, stack, and a Name with the stack's name, which logical names do not contain."""
    return {"Name": f"{pulumi.get_stack()}-{name}", **stack_tags()}


def stack_tags() -> dict[str, str]:
    """Tags that all of a stack's resources share."""
    return {PROJECT_TAG: pulumi.get_project(), STACK_TAG: pulumi.get_stack()}


def name_prefix(name: str) -> str:
    """Prefix of a cluster's logical names, and so of the physical names that Pulumi derives from them.

    It has only characters that buckets, roles, host names and ECS accept: lower-case letters, digits and hyphens. A
    name that is changed or shortened gets a hash, which keeps it unique.
    """
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if allowed.startswith(RESERVED):
        allowed = f"ray-{allowed}"
    if len(allowed) <= LONGEST_PREFIX and allowed == name:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
    return f"{allowed[: LONGEST_PREFIX - HASH_LENGTH - 1].rstrip('-')}-{digest}"


def kind_in_names(prefix: str, kind: str) -> str:
    """Kind of node in logical names; with a hash if the names of its roles would be too long for IAM."""
    room = LONGEST_KIND - len(prefix) - 1
    if len(kind) <= room:
        return kind
    # One less, since the longest suffix, "-task-execution", follows the singular of other kinds.
    digest = hashlib.sha256(kind.encode()).hexdigest()[:6]
    return f"{kind[: room - 8].rstrip('-')}-{digest}" if room > 8 else digest


def birth_name() -> str:
    """Stack name in at most 16 letters, digits and hyphens, for names that survive `pulumi stack rename`."""
    return re.sub(r"[^a-z0-9]+", "-", pulumi.get_stack().lower()).strip("-")[:16].rstrip("-") or "stack"


def metrics_namespace(cluster_name: pulumi.Input[str]) -> pulumi.Output[str]:
    """CloudWatch namespace of a cluster's metrics; an IAM policy can restrict PutMetricData only by namespace."""
    return pulumi.Output.concat("ray-on-ecs/", cluster_name)


def add_tags(
    company: Mapping[str, pulumi.Input[str]], defaults: Mapping[str, str]
) -> Callable[[pulumi.ResourceTransformArgs], pulumi.ResourceTransformResult | None]:
    """Transform that tags all taggable resources of a component: with `tags`, and the user's tags (`company`).

    `defaults`, the AWS provider's default tags, are added where the provider doesn't: to Auto Scaling groups, and to
    what launch templates launch, which causes the cost. Pulumi's engine runs the transform, also on children of awsx
    components, and passes properties by their schema names.
    """

    def of_group(values: Mapping[str, Any]) -> list[dict[str, Any]]:
        # The launch template tags the instances.
        return [{"key": key, "value": value, "propagateAtLaunch": False} for key, value in values.items()]

    def add(args: pulumi.ResourceTransformArgs) -> pulumi.ResourceTransformResult | None:
        props: dict[str, Any] = dict(args.props)
        if args.type_ == "aws:autoscaling/group:Group":
            own = [*of_group(tags(args.name)), *(props.get("tags") or ())]
            present = {tag["key"].lower() for tag in own}
            more = {key: value for key, value in {**defaults, **company}.items() if key.lower() not in present}
            props["tags"] = [*own, *of_group(more)]
        elif args.type_ == "aws:ec2/launchTemplate:LaunchTemplate":
            name = args.name.removesuffix("-template")
            props["tagSpecifications"] = [
                {"resourceType": kind, "tags": {**defaults, **company, **tags(f"{name}-{kind}")}}
                for kind in ("instance", "volume", "network-interface")
            ]
        elif _takes_tags(args.type_):
            props["tags"] = {**company, **tags(args.name), **(props.get("tags") or {})}
        else:
            return None
        return pulumi.ResourceTransformResult(props, args.opts)

    return add


def _takes_tags(resource_type: str) -> bool:
    """True if the AWS provider's class of a type, e.g. aws:iam/role:Role, has tags."""
    package, module, name = resource_type.split(":")
    return package == "aws" and hasattr(getattr(getattr(aws, module.partition("/")[0], None), name, None), "tags")
