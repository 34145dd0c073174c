"""`make emulate`: the stack on an emulated AWS, created, changed and destroyed with the real AWS provider."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.emulator import alarm, aws
from tests.emulator.options import Step, options, steps
from tests.emulator.program import Program
from tests.emulator.stack import Stack
from tests.emulator.terraform import Refused, provider_running
from tests.infra.stacks import EVERYTHING

MISSING = (
    "terraform: not found; install it from https://developer.hashicorp.com/terraform/install, "
    "see tests/emulator/README.md"
)
ALL = {**EVERYTHING, "kmsKeyArn": aws.KEY, "permissionsBoundary": aws.BOUNDARY}
ALL["imageBuild"] = "codebuild"
CPU_WORKERS = "cpuWorkerInstanceTypes=m6i.xlarge,cpuWorkerCount=1"
POOLS = {
    "l4": {"instanceTypes": ["g6.xlarge"], "zones": ["us-west-2b", "us-west-2a"], "max": 2, "spot": True},
    "prep": {"instanceTypes": ["c6i.2xlarge"], "max": 1},
}
# `make emulate` without ARGS: options of each run.
RUNS = {
    "changes in place": [
        "--then",
        f"stack=prod,workerCount=3,rootVolumeGib=200,{CPU_WORKERS},availabilityZones=us-west-2a,us-west-2b",
        f"--then=workerPools={json.dumps(POOLS)}",
        # CPU workers stay: without them the head has another task definition, and for its replacement beside deletions
        # Terraform finds no order, as it deletes what nothing needs any more before updates.
        "--then=availabilityZones=us-west-2a,workerPools={},natInstance=true",
    ],
    "everything, asleep": [*(f"--config={key}={value}" for key, value in ALL.items()), "--alarm=head-sleep"],
}


def main() -> int:
    """Run what the options say, or all of RUNS."""
    if not shutil.which("terraform"):
        print(MISSING, file=sys.stderr)
        return 1
    if len(sys.argv) > 1:
        try:
            return emulate(options().parse_args())
        except Refused as error:
            print(error, file=sys.stderr)
            return 1
    status = 0
    for name, run in RUNS.items():
        print(f"== {name}", flush=True)
        status |= subprocess.call([sys.executable, "-u", "-m", "tests.emulator", *run])
    return status


def emulate(given: argparse.Namespace) -> int:
    """Bring the stack up, change it, destroy it; 0 if nothing was refused, and nothing is left."""
    out = (given.out or Path(tempfile.mkdtemp(prefix="emulate-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    print("files and logs:", out)
    program = Program(given.project.resolve(), "first", given.stack, {}, given.region)
    program = program.changed(dict(given.config))
    first = Stack(out / "first", program)
    with aws.running(given.region, out / "aws.log") as url, provider_running(first.terraform):
        aws.create_prerequisites()
        before = aws.inventory()
        schema = first.terraform.schema()
        if given.plan_only:
            _, plan, _ = first.preview(schema, {})
            print(*plan.problems or ["planned"], sep="\n")
            return 1 if plan.problems else 0
        stacks = [first]
        passed = [update(stacks, step, schema, out) for step in steps(given.steps)]
        if given.keep:
            input(f"the stack is up at {url}; Return destroys it ")
        return 0 if destroy(stacks, before) and all(passed) else 1


def update(stacks: list[Stack], step: Step, schema: dict[str, Any], out: Path) -> bool:
    """Take a step, which must end as it says, and after which another plan of any stack changes nothing.

    An update leaves the numbers of tasks and instances as scaling policies have set them.
    """
    if step.alarm:
        alarm.ring(step.alarm)
        print("alarm", step.alarm, *(f"{name}={number}" for name, number in alarm.numbers().items()))
        return _is_settled(stacks)
    before = alarm.numbers()
    if step.state:
        stacks.append(Stack(out / step.state, replace(stacks[-1].program, state=step.state)))
    stack, began = stacks[-1], time.monotonic()
    print(f"up {stack.folder.name}", *(f"{key}={value}" for key, value in step.changes.items()))
    problems, refusal = [], ""
    try:
        problems = stack.up(schema, step.changes)
    except Refused as error:
        refusal = str(error)
        print("   refused:", refusal)
    for problem in problems:
        print("  ", problem)
    after = alarm.numbers()
    reset = {name: number for name, number in after.items() if before.get(name, number) != number}
    if reset:
        print("   reset:", *(f"{name} from {before[name]} to {number}" for name, number in reset.items()))
    print(f"   {time.monotonic() - began:.0f} s")
    settled = _is_settled(stacks)
    as_told = step.refused in refusal if step.refused else not refusal
    if not as_told and step.refused:
        print("   not refused with:", step.refused)
    return settled and as_told and not reset and not stack.plan.problems


def _is_settled(stacks: list[Stack]) -> bool:
    settled = all(stack.terraform.is_settled() for stack in stacks)
    print("   another plan:", "no changes" if settled else "CHANGES")
    return settled


def destroy(stacks: list[Stack], before: set[str]) -> bool:
    """Destroy all stacks, and look for what is left behind."""
    for stack in reversed(stacks):
        began = time.monotonic()
        stack.destroy()
        print(f"destroyed {stack.folder.name} in {time.monotonic() - began:.0f} s")
    kept = set().union(*(stack.kept for stack in stacks))
    left = aws.inventory() - before
    print("left behind:", *sorted(left - kept) or ["nothing"], *(f"(retained: {each})" for each in left & kept))
    return not left - kept


if __name__ == "__main__":
    sys.exit(main())
