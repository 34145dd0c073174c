"""The Ray workers: one on each GPU instance, with all of its CPUs and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra import containers
from infra.ray_node import RayNode, RayNodeArgs
from infra.settings import Workers
from infra.sizing import TaskSize


@dataclass(frozen=True, kw_only=True)
class RayWorkersArgs:
    """Inputs of RayWorkers; `head_host` is the DNS name under which they find the head.

    Where their number is elastic, they begin with the lowest, and nothing here changes that later.
    """

    node: RayNodeArgs
    provider: pulumi.Input[str]
    size: TaskSize
    workers: Workers
    head_host: pulumi.Input[str]


class RayWorkers(RayNode):
    """The workers of the cluster; they may start before the head and wait for it."""

    def __init__(self, name: str, args: RayWorkersArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(
            "RayWorkers",
            name,
            args.node,
            opts,
            container=args.node.container(containers.worker, size=args.size, head_host=args.head_host),
            size=args.size,
            count=args.workers.lowest,
            capacity_provider=args.provider,
            scaled=args.workers.elastic,
        )
