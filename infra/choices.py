"""Choices of the first `pulumi up`, which the state keeps: the cluster's name, its zone, and its identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_random as random

from infra.tags import birth_name

# Keeper with the zones of which the first `pulumi up` could choose.
ZONES = "zones"


@dataclass(frozen=True, kw_only=True)
class ChoicesArgs:
    """Inputs of Choices, of which those of the first `pulumi up` count.

    A random end is added to `name`, of several `zones` one is chosen, and `identity` has the values that can't change
    while the cluster is up, and the builder of its image.
    """

    name: str
    zones: Sequence[str]
    identity: Mapping[str, str]


class Choices(pulumi.ComponentResource):
    """Random ID, which doesn't change with its keepers: a renamed stack keeps its cluster and its zone.

    In a preview the choices are known if the cluster is up.
    """

    cluster_name: pulumi.Output[str]
    zone: pulumi.Output[str]
    identity: pulumi.Output[Mapping[str, str]]

    def __init__(self, name: str, args: ChoicesArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Choices", name, None, opts)
        chosen = random.RandomId(
            f"{name}-id",
            byte_length=3,
            prefix=f"{args.name}-{birth_name()}-",
            keepers={**args.identity, ZONES: " ".join(args.zones)},
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["prefix", "keepers"]),
        )
        self.cluster_name = chosen.hex
        self.identity = chosen.keepers.apply(lambda keepers: keepers or {})
        self.zone = pulumi.Output.all(self.identity, chosen.hex).apply(lambda values: _zone(*values))
        self.register_outputs({"cluster_name": self.cluster_name, "zone": self.zone})


def _zone(keepers: Mapping[str, str], cluster_name: str) -> str:
    """Zone of the first `pulumi up`, by the random end of the cluster's name; empty if there was no choice."""
    zones = keepers.get(ZONES, "").split()
    return zones[int(cluster_name.rpartition("-")[2], 16) % len(zones)] if zones else ""
