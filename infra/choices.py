"""Choices of the first `pulumi up`, which the state keeps: the cluster's name, its zone, and its identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_random as random

from infra.tags import birth_name


@dataclass(frozen=True, kw_only=True)
class ChoicesArgs:
    """Inputs of Choices, of which those of the first `pulumi up` count.

    Attributes:
        name: Name of the cluster, to which the stack's name and a random end are added.
        zones: Availability zones of which one is chosen; none for an existing network.
        identity: Values that can't change while the cluster is up, e.g. its account and region.
    """

    name: str
    zones: Sequence[str]
    identity: Mapping[str, str]


class Choices(pulumi.ComponentResource):
    """Random values, which don't change with their inputs: a renamed stack keeps its cluster and its zone.

    In a preview they are known if the cluster is up.
    """

    cluster_name: pulumi.Output[str]
    zone: pulumi.Output[str]
    identity: pulumi.Output[Mapping[str, str]]

    def __init__(self, name: str, args: ChoicesArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Choices", name, None, opts)
        cluster = random.RandomId(
            f"{name}-cluster",
            byte_length=3,
            prefix=f"{args.name}-{birth_name()}-",
            keepers=args.identity,
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["prefix", "keepers"]),
        )
        self.cluster_name = cluster.hex
        self.identity = cluster.keepers.apply(lambda keepers: keepers or {})
        self.zone = pulumi.Output.from_input("")
        if args.zones:
            zone = random.RandomShuffle(
                f"{name}-zone",
                inputs=args.zones,
                result_count=1,
                opts=pulumi.ResourceOptions(parent=self, ignore_changes=["inputs"]),
            )
            self.zone = zone.results[0]
        self.register_outputs({"cluster_name": self.cluster_name, "zone": self.zone})
