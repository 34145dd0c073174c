"""The Ray head: it schedules, serves the dashboard and the Jobs API, and runs the job's driver."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra import containers
from infra.ray_node import RayNode, RayNodeArgs
from infra.sizing import TaskSize


@dataclass(frozen=True, kw_only=True)
class RayHeadArgs:
    """Inputs of RayHead; `gpus` counts those of all workers, on which a training job runs."""

    node: RayNodeArgs
    provider: pulumi.Input[str]
    size: TaskSize
    registry_arn: pulumi.Input[str]
    gpus: int


class RayHead(RayNode):
    """The one head of the cluster, under a DNS name that follows its task."""

    def __init__(self, name: str, args: RayHeadArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        container = args.node.container(containers.head, size=args.size, bucket=args.node.bucket_name, gpus=args.gpus)
        super().__init__(
            "RayHead",
            name,
            args.node,
            opts,
            container=container,
            size=args.size,
            count=1,
            capacity_provider=args.provider,
            registry_arn=args.registry_arn,
        )
        self.register_outputs({})
