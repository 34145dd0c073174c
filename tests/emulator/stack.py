"""A stack of the program on the emulated AWS: created, changed, and destroyed."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulumi

from tests.emulator import program
from tests.emulator.monitor import Plan
from tests.emulator.program import Program
from tests.emulator.terraform import Refused, Terraform

# pulumi-aws deletes these before it creates their replacement; of all others the replacement comes first.
DELETED_FIRST = {
    "aws_appautoscaling_target",
    "aws_cloudwatch_dashboard",
    "aws_ecs_cluster_capacity_providers",
    "aws_iam_role_policy_attachment",
    "aws_route",
    "aws_route_table_association",
    "aws_security_group_rule",
    "aws_vpc_security_group_egress_rule",
    "aws_vpc_security_group_ingress_rule",
}
# The engine deletes what a program no longer has after all updates, Terraform only with this setting. Those of a stack
# that names its zone, or has no file systems any more, go while others are replaced: Terraform would call it a cycle.
DELETED_LAST = {"aws_iam_role_policy", "aws_placement_group"}
# Addresses of a kind that are printed.
MANY = 20


@dataclass
class Stack:
    """A program's stack, with its state in a folder.

    Attributes:
        plan: What is up.
        generations: How often a resource has been replaced, by address.
        kept: Names of what the stack no longer manages and has not deleted.
    """

    folder: Path
    program: Program
    plan: Plan = field(default_factory=Plan)
    generations: Counter[str] = field(default_factory=Counter)
    kept: set[str] = field(default_factory=set)

    @property
    def terraform(self) -> Terraform:
        """Terraform with the stack's state."""
        return Terraform(self.folder, self.program.region)

    def preview(self, schema: dict[str, Any], changes: dict[str, str]) -> tuple[Program, Plan, dict[str, list[str]]]:
        """Plan an update under a changed configuration."""
        changed = self.program.changed(changes)
        plan = program.run(changed, schema, self.folder / "lookups", self.plan)
        self._write(plan)
        return changed, plan, kinds(self.terraform.plan(), plan.replaced_on)

    def up(self, schema: dict[str, Any], changes: dict[str, str]) -> list[str]:
        """Make AWS like the program under a changed configuration, and return problems and the provider's warnings."""
        try:
            changed, plan, by_kind = self.preview(schema, changes)
            for kind, addresses in by_kind.items():
                print(f"   {kind} {len(addresses)}:", *addresses[:MANY], *["…"][: len(addresses) // MANY])
            self._forget({*by_kind["delete"], *by_kind["replace"]} & self.plan.retained)
            self.generations.update(by_kind["replace"])
            self._write(plan, by_kind["replace"])
            told = self.terraform.apply(*(f"-replace={address}" for address in by_kind.get("force", ())))
        except Refused:
            self._write(self.plan)
            raise
        self.program, self.plan = changed, plan
        names = self.terraform.outputs()
        for number, build in enumerate(plan.builds):
            try:
                print("   image:", asyncio.run(build.image_uri(names[f"image_build_{number}"])))
            except pulumi.RunError as error:
                raise Refused(str(error)) from error
        return [*plan.problems, *(f"the provider warns: {warning}" for warning in told)]

    def destroy(self) -> None:
        """Destroy the stack, except for what it retains or what goes with something else."""
        self._forget(self.plan.retained | self.plan.deleted_with)
        self.terraform.run("destroy", "-input=false", "-auto-approve")

    def _forget(self, addresses: set[str]) -> None:
        """Take out of the state what is not to be deleted."""
        if not addresses:
            return
        state = self.terraform.json("show").get("values", {}).get("root_module", {}).get("resources", [])
        values = {resource["address"]: resource["values"] for resource in state if resource["address"] in addresses}
        if values:
            self.terraform.run("state rm", *values)
        for address in values.keys() & self.plan.retained:
            self.kept |= {value for value in values[address].values() if isinstance(value, str)}

    def _write(self, plan: Plan, replaced: Iterable[str] = ()) -> None:
        outputs = {name: {"value": value, "sensitive": True} for name, value in plan.outputs.items()}
        parts = {"resource": self.resources(plan, replaced), "data": plan.sources, "output": outputs}
        self.terraform.write({name: part for name, part in parts.items() if part})

    def resources(self, plan: Plan, replaced: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
        """A plan's resources with physical names; of those that are replaced, with the order."""
        resources = copy.deepcopy(plan.resources)
        for kind, bodies in resources.items():
            for key, body in bodies.items():
                address = f"{kind}.{key}"
                if address in plan.names:
                    argument, name = plan.names[address]
                    body[argument] = self.physical_name(address, name)
                is_replaced = address in replaced and address not in plan.deleted_first and kind not in DELETED_FIRST
                if is_replaced or kind in DELETED_LAST:
                    body["lifecycle"] = {**body.get("lifecycle", {}), "create_before_destroy": True}
        return resources

    def physical_name(self, address: str, name: str) -> str:
        """The logical name with an end that looks random, another for each replacement; a bucket's is in lower case."""
        seed = f"{self.program.state} {address} {self.generations[address]}"
        name = f"{name}-{hashlib.sha256(seed.encode()).hexdigest()[:7]}"
        return name.lower() if address.startswith("aws_s3_bucket.") else name


def kinds(planned: dict[str, Any], replaced_on: dict[str, list[str]]) -> dict[str, list[str]]:
    """Addresses by what the engine does with them; `force` has those that Terraform would only update."""
    by_kind = defaultdict(list)
    for resource in planned["resource_changes"]:
        address, change = resource["address"], resource["change"]
        before, after = change["before"] or {}, change["after"] or {}
        kind = "replace" if len(change["actions"]) == 2 else change["actions"][0]
        if kind == "update" and any(before.get(name) != after.get(name) for name in replaced_on.get(address, [])):
            by_kind["force"].append(address)
            kind = "replace"
        if resource["mode"] == "managed" and kind != "no-op" and "deposed" not in resource:
            by_kind[kind].append(address)
    return by_kind
