"""The Ray head: it schedules, serves the dashboard and the Jobs API, and runs the job's driver."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra import containers
from infra.handles import Named
from infra.ray_node import RayNode, RayNodeArgs
from infra.sizing import TaskSize
from infra.tags import metrics_namespace


@dataclass(frozen=True, kw_only=True)
class RayHeadArgs:
    """Inputs of RayHead; none tells how many workers there are, so that a change to them leaves the head running."""

    node: RayNodeArgs
    provider: pulumi.Input[str]
    size: TaskSize
    registry_arn: pulumi.Input[str]
    worker_price: Named


class RayHead(RayNode):
    """The one head of the cluster, under a DNS name that follows its task, with its state on the instance's disk."""

    def __init__(self, name: str, args: RayHeadArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        container = args.node.container(
            containers.head,
            size=args.size,
            bucket=args.node.bucket.name,
            metrics_namespace=metrics_namespace(args.node.cluster.name),
            price_parameter=args.worker_price.name,
        )
        super().__init__(
            "RayHead",
            name,
            args.node,
            opts,
            container=container,
            size=args.size,
            count=1,
            capacity_provider=args.provider,
            rights={
                "metrics_namespace": metrics_namespace(args.node.cluster.name),
                "price_arn": args.worker_price.arn,
            },
            registry_arn=args.registry_arn,
            kept=containers.STATE,
        )
