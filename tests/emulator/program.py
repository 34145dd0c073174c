"""The Pulumi program as a plan: its resources in Terraform's form, after a run with the monitor that records them."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pulumi
import yaml
from pulumi.runtime.stack import run_pulumi_func

from infra.image_build import ImageBuild
from tests.emulator.monitor import ACCOUNT, DIGEST, Monitor, Plan
from tests.emulator.terraform import Refused, Terraform


@dataclass(frozen=True)
class Program:
    """A Pulumi project in a folder, as a stack with a configuration and the name of a state.

    Random values and the ends of physical names follow from the state's name. Keys of `config` have their namespace.
    """

    folder: Path
    state: str
    stack: str
    config: dict[str, str]
    region: str

    def configuration(self) -> dict[str, str]:
        """Defaults of Pulumi.yaml, the stack's file and what was given, in this order."""
        found = {"aws:allowedAccountIds": json.dumps([ACCOUNT])}
        for file in ("Pulumi.yaml", f"Pulumi.{self.stack}.yaml"):
            for key, value in (_yaml(self.folder / file).get("config") or {}).items():
                plain = value.get("value", value.get("default")) if isinstance(value, dict) else value
                if plain is not None:
                    found[self._full(key)] = plain if isinstance(plain, str) else json.dumps(plain)
        return {**found, **self.config, "aws:region": self.region}

    def changed(self, changes: dict[str, str]) -> Program:
        """The program under a changed configuration; the key `stack` renames the stack, as Pulumi's command does."""
        given = {self._full(key): value for key, value in changes.items() if key != "stack"}
        if name := changes.get("stack"):  # the stack's file goes with it
            return replace(self, stack=name, config={**self.configuration(), **given})
        return replace(self, config={**self.config, **given})

    @property
    def project(self) -> str:
        """The project's name."""
        return _yaml(self.folder / "Pulumi.yaml")["name"]

    def _full(self, key: str) -> str:
        return key if ":" in key else f"{self.project}:{key}"


def run(program: Program, schema: dict[str, Any], lookups: Path, before: Plan) -> Plan:
    """Run a program in a new process, as Pulumi's runtime runs one program, and return its plan.

    Its look-ups are made in the folder `lookups`; random values are kept from the plan before.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        plan, refusal = processes.submit(_run, program, schema, lookups, before).result()
    if refusal:
        raise Refused(refusal)
    return plan


def _run(program: Program, schema: dict[str, Any], lookups: Path, before: Plan) -> tuple[Plan, str]:
    plan = Plan(kept=before.kept, answers=before.answers)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    config = program.configuration()
    os.environ["PULUMI_CONFIG"] = json.dumps(config)  # as the engine does
    os.chdir(program.folder)
    sys.path.insert(0, str(program.folder))
    pulumi.runtime.set_all_config(config)
    monitor = Monitor(plan, schema, Terraform(lookups, program.region), program.state, loop)
    pulumi.runtime.set_mocks(monitor, project=program.project, stack=program.stack, preview=False, monitor=monitor)
    exported: dict[str, pulumi.Output[Any]] = {}

    def export(name: str, value: Any) -> None:
        exported[name] = pulumi.Output.from_input(value)

    built: dict[str, Any] = {}

    async def image_uri(build: ImageBuild, names: dict[str, str]) -> str:
        built[f"image_build_{len(plan.builds)}"] = names
        plan.builds.append(build)
        return f"{names['repository']}@{DIGEST}"

    def main() -> None:
        runpy.run_path(str(program.folder / "__main__.py"), run_name="__main__")

    async def outputs() -> dict[str, Any]:
        await run_pulumi_func(main)
        return {name: await output.future() for name, output in exported.items()}

    try:
        with mock.patch.object(pulumi, "export", export), mock.patch.object(ImageBuild, "image_uri", image_uri):
            plan.outputs = {**loop.run_until_complete(outputs()), **built}
    except Exception as error:
        if not isinstance(error, pulumi.RunError):
            traceback.print_exc()
        return plan, str(error)
    return plan, ""


def _yaml(file: Path) -> dict[str, Any]:
    return (yaml.safe_load(file.read_text()) or {}) if file.exists() else {}
