"""What a worker costs, where runs find it; see training/run/cost.py."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pulumi
import pulumi_aws as aws

from infra.handles import Named
from infra.prices import Price
from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class WorkerPriceArgs:
    """Inputs of WorkerPrice; None where AWS would not say."""

    price: Price | None


class WorkerPrice(pulumi.ComponentResource):
    """A parameter, there in any case, because a task definition that named another price would replace what runs."""

    parameter: Named

    def __init__(self, name: str, args: WorkerPriceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:WorkerPrice", name, None, opts)
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Price of one worker instance, for the costs of a run",
            type="String",
            value=json.dumps(asdict(args.price) if args.price else None),
            tags=tags(f"{name}-parameter"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter = Named(name=parameter.name, arn=parameter.arn)
        self.register_outputs({"parameter_name": parameter.name})
