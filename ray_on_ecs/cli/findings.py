"""Findings of `ray-on-ecs doctor`: problems, notices, and what later checks take from earlier ones."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo

# Timeout of a request.
ANSWER_SECONDS = 5
# AWS's error codes for missing permissions, and of emulators that lack an operation.
DENIED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "UnknownOperationException"),
    *("NotImplemented", "InvalidAction", "NoSuchResourceException"),
}
UP = "pulumi up"


class Problem(Exception):
    """Failed check: the fault, and the command that fixes it."""

    def __init__(self, line: str, fix: str = "") -> None:
        super().__init__(line)
        self.fix = fix


class Notice(Problem):
    """Finding that need not be a fault."""


@dataclass
class Findings:
    """Results of the checks so far; a check that needs one runs after the check that sets it has passed.

    Attributes:
        flags: The flags that name the cluster.
        connections: Closes what the checks have opened.
        cluster: The cluster.
        stack: Its stack.
        head: Its head, once it has answered.
        workers: The stack's description of its workers.
        services: ECS's description of the service of each kind of node.
        running: The number of running ECS tasks of each kind of node.
    """

    flags: dict[str, Any]
    connections: ExitStack
    cluster: Cluster = field(init=False)
    stack: Stack = field(init=False)
    head: Head = field(init=False)
    workers: ClusterInfo = field(init=False)
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
