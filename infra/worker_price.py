"""What a worker costs, where runs find it; see training/run/cost.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.references import NodeSpec, ResourceRef
from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class WorkerPriceArgs:
    """Inputs of WorkerPrice."""

    worker: NodeSpec


class WorkerPrice(pulumi.ComponentResource):
    """A parameter, there in any case, because a task definition that named another price would replace what runs."""

    parameter: ResourceRef

    def __init__(self, name: str, args: WorkerPriceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:WorkerPrice", name, None, opts)
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Price of one worker instance, for the costs of a run",
            type="String",
            value=json.dumps(_price(args.worker)),
            tags=tags(f"{name}-parameter"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter = ResourceRef(name=parameter.name, arn=parameter.arn)
        self.register_outputs({"parameter_name": parameter.name})


def _price(worker: NodeSpec) -> dict[str, Any] | None:
    """The price, or None where AWS would not say."""
    return None if worker.usd is None else {"instance_type": worker.instance_type, "hourly_usd": worker.usd}
