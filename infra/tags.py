"""Name prefix of a cluster's resources, and the tags that they share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import pulumi

# The longest of our names, a role's ("-worker-task-execution"), and what Pulumi puts behind it ("-1a2b3c4") leave this
# much of IAM's 64 characters; S3's 63, and a DNS label's, leave more.
LONGEST_PREFIX = 34
HASH_LENGTH = 8
# AWS takes these beginnings of a capacity provider, a parameter, a document, a security group or a bucket for its own.
RESERVED = ("amazon", "aws", "ecs", "fargate", "ssm", "sg-", "amzn", "xn--", "sthree-")

# A program can't read its stack's state. So the tags of its tasks' security group say which cluster the stack has, in
# which zone its instances are and, with a VPC of its own, in which zones that VPC has subnets; a role's tag says which
# region it is in, since roles are the same in every region.
TAG_PREFIX = "ray-on-ecs:"
PROJECT_TAG, STACK_TAG, CLUSTER_TAG, REGION_TAG, ZONE_TAG, ZONES_TAG = (
    f"{TAG_PREFIX}{name}" for name in ("project", "stack", "cluster", "region", "zone", "zones")
)
# Ends of the names of that group and that role.
TASKS_GROUP, HEAD_ROLE = "network-tasks-group", "head-instance-role"


def tags(name: str) -> dict[str, str]:
    """Tags of one resource: a Name that begins with the stack's, which no logical name contains, project and stack."""
    return {"Name": f"{pulumi.get_stack()}-{name}", **stack_tags()}


def stack_tags() -> dict[str, str]:
    """Tags that all of a stack's resources share."""
    return {PROJECT_TAG: pulumi.get_project(), STACK_TAG: pulumi.get_stack()}


def name_prefix(name: str) -> str:
    """Prefix of all logical names of a cluster, and so of the physical names that Pulumi derives from them.

    The cluster's name in the characters that buckets, roles, host names and ECS all accept: lower-case letters, digits
    and hyphens. A name that changes or is too long ends with a hash, so that two such names differ.
    """
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if allowed.startswith(RESERVED):
        allowed = f"ray-{allowed}"
    if len(allowed) <= LONGEST_PREFIX and allowed == name:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
    return f"{allowed[: LONGEST_PREFIX - HASH_LENGTH - 1].rstrip('-')}-{digest}"


def birth_name() -> str:
    """The stack's name in at most 16 letters, digits and hyphens, for names that outlive `pulumi stack rename`."""
    return re.sub(r"[^a-z0-9]+", "-", pulumi.get_stack().lower()).strip("-")[:16].rstrip("-") or "stack"


def metrics_namespace(cluster_name: pulumi.Input[str]) -> pulumi.Output[str]:
    """CloudWatch namespace of one cluster's metrics, by which alone a policy can tell them from another's."""
    return pulumi.Output.concat("ray-on-ecs/", cluster_name)


def company_tags(
    company: Mapping[str, pulumi.Input[str]], defaults: Mapping[str, str]
) -> Callable[[pulumi.ResourceTransformArgs], pulumi.ResourceTransformResult | None]:
    """A transform of a component and all below it: whatever carries tags carries the company's, too.

    `defaults`, the AWS provider's default tags, are added where it doesn't: to groups, and to what launch templates
    start. Pulumi's engine runs it, also on the children of awsx's components, and names properties as the schema does.
    """

    def add(args: pulumi.ResourceTransformArgs) -> pulumi.ResourceTransformResult | None:
        props: dict[str, Any] = dict(args.props)
        if args.type_ == "aws:autoscaling/group:Group":
            own = {tag["key"].lower() for tag in props["tags"]}
            tags = [
                {"key": key, "value": value, "propagateAtLaunch": False}
                for key, value in {**defaults, **company}.items()
                if key.lower() not in own
            ]
            changed = {"tags": [*props["tags"], *tags]}
        elif args.type_ == "aws:ec2/launchTemplate:LaunchTemplate":
            launched = [
                {**specification, "tags": {**defaults, **company, **specification["tags"]}}
                for specification in props["tagSpecifications"]
            ]
            changed = {"tagSpecifications": launched}
        elif isinstance(props.get("tags"), dict) and company:
            changed = {"tags": {**company, **props["tags"]}}
        else:
            return None
        return pulumi.ResourceTransformResult({**props, **changed}, args.opts)

    return add
