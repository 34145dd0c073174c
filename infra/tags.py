"""What tells a stack's parts in the account: the tags that everything carries, and the few names that are given."""

from __future__ import annotations

import pulumi

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


def physical_name(name: str) -> str:
    """Name of something that ECS keeps under a given name; a stack's name may hold dots, which ECS does not take."""
    return f"{pulumi.get_project()}-{pulumi.get_stack()}-{name}".replace(".", "-")


def metrics_namespace(cluster_name: pulumi.Input[str]) -> pulumi.Output[str]:
    """CloudWatch namespace of one cluster's metrics, by which alone a policy can tell them from another's."""
    return pulumi.Output.concat(pulumi.get_project(), "/", cluster_name)
