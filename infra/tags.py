"""What tells a stack's parts in the account: the beginning of their names, and the tags that everything carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import pulumi
import pulumi_aws as aws

# The longest of our names, a role's ("-worker-task-execution"), and what Pulumi puts behind it ("-1a2b3c4") leave this
# much of IAM's 64 characters; S3's 63, and a DNS label's, leave more.
LONGEST_PREFIX = 34
HASH_LENGTH = 8
# AWS takes these beginnings of a capacity provider, a parameter, a security group or a bucket for its own.
RESERVED = ("aws", "ecs", "fargate", "ssm", "sg-", "amzn", "xn--", "sthree-")

# Tags in which the stack's security group remembers from one `up` to the next where the stack is: the zone of its
# instances, and with a network of its own the zones that this has subnets in.
ZONE, ZONES = "zone", "zones"
# The end of that group's name.
SECURITY_GROUP = "security-group"


def tags(name: str) -> dict[str, str]:
    """Tags of one resource: its name for people, and the project and stack that it belongs to."""
    return {"Name": name, **stack_tags()}


def stack_tags() -> dict[str, str]:
    """Tags that all of a stack's resources share."""
    return {"project": pulumi.get_project(), "stack": pulumi.get_stack()}


def name_prefix(name: str) -> str:
    """What the names of all of a cluster's components begin with, and so those in the account, made of them by Pulumi.

    It is the cluster's name in the characters that buckets, roles, host names and ECS all take: lower-case letters,
    digits and hyphens. Where that changes the name, or the name is too long, a hash keeps it apart from its likes.
    """
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if allowed.startswith(RESERVED):
        allowed = f"ray-{allowed}"
    if len(allowed) <= LONGEST_PREFIX and allowed == name:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
    return f"{allowed[: LONGEST_PREFIX - HASH_LENGTH - 1].rstrip('-')}-{digest}"


def metrics_namespace(cluster_name: pulumi.Input[str]) -> pulumi.Output[str]:
    """CloudWatch namespace of one cluster's metrics, by which alone a policy can tell them from another's."""
    return pulumi.Output.concat(pulumi.get_project(), "/", cluster_name)


def company_tags(given: Mapping[str, str]) -> Callable[[pulumi.ResourceTransformationArgs], Any]:
    """A transformation of a cluster and all below it: whatever carries tags carries these, too.

    `aws:defaultTags` are added where the AWS provider doesn't: to groups, and to what launch templates start.
    """
    defaults = (pulumi.Config("aws").get_object("defaultTags") or {}).get("tags") or {}

    def add(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult | None:
        props: dict[str, Any] = dict(args.props)
        if args.type_ == "aws:autoscaling/group:Group":
            own = {each.key.lower() for each in props["tags"]}
            tags = [
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=False)
                for key, value in {**defaults, **given}.items()
                if key.lower() not in own
            ]
            changed = {"tags": [*props["tags"], *tags]}
        elif args.type_ == "aws:ec2/launchTemplate:LaunchTemplate":
            launched = [
                aws.ec2.LaunchTemplateTagSpecificationArgs(
                    resource_type=each.resource_type, tags={**defaults, **given, **each.tags}
                )
                for each in props["tag_specifications"]
            ]
            changed = {"tag_specifications": launched}
        elif isinstance(props.get("tags"), dict) and given:
            changed = {"tags": {**given, **props["tags"]}}
        else:
            return None
        return pulumi.ResourceTransformationResult({**props, **changed}, args.opts)

    return add
