"""What one component hands to the next when it takes more than one value to name a thing."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where instances and tasks run; they start after `network` is complete, and are gone before any part of it."""

    subnet_id: pulumi.Output[str]
    security_group_id: pulumi.Output[str]
    network: pulumi.Resource


@dataclass(frozen=True, kw_only=True)
class Named:
    """A bucket, a log group or a cluster: by its name for those who use it, by its ARN for policies."""

    name: pulumi.Output[str]
    arn: pulumi.Output[str]


@dataclass(frozen=True, kw_only=True)
class EcsService:
    """An ECS service, by the two names that its metrics and its scaling go by."""

    cluster: pulumi.Output[str]
    name: pulumi.Output[str]
