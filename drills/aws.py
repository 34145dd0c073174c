"""Checks of a stack that is up, for what only AWS can answer; docs/first-hour-on-aws.md explains them.

usage: python -m drills.aws --yes-this-costs-money [--stack NAME | --outputs FILE]

It starts a run on one GPU instance, disturbs it, and prints a block to paste into an issue. It refuses a stack in use,
and undoes its changes also after Ctrl-C or a failure. The instance stops after the stack's idle timeout.

Exit status: 0 if no check failed and all is undone, 1 otherwise, 2 for a wrong argument or a stack in use, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from drills import aws_checks
from drills.aws_checks import Answer, NotStarted
from drills.aws_site import Site
from ray_on_ecs.aws import DENIED, Refused
from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.clusters import CLUSTER_VARIABLE, choose
from ray_on_ecs.contract import WORKERS
from ray_on_ecs.errors import TrainingError, UsageError, one_line
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.signals import exit_status_of, stoppable

# In this order: the last one ends the worker.
CHECKS = {
    "F start of a worker": aws_checks.start,
    "C pull and timeouts": aws_checks.agent,
    "D deployment during a run": aws_checks.deploy,
    "B draining a protected worker": aws_checks.drain,
}
RESULTS = {True: "pass", False: "FAIL", None: "skipped"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the block."""
    about = "Check a stack on AWS."
    parser = argparse.ArgumentParser(prog="python -m drills.aws", description=about, allow_abbrev=False)
    parser.add_argument("--yes-this-costs-money", action="store_true", help="required: it starts a GPU instance")
    parser.add_argument("--stack", metavar="NAME", help="Pulumi stack (default: the selected one)")
    parser.add_argument("--outputs", metavar="FILE", help="file of pulumi stack output --json")
    given = parser.parse_args(arguments)
    if not given.yes_this_costs_money:
        parser.error("a GPU instance runs for an hour or so, and is billed; --yes-this-costs-money starts the checks")
    try:
        site = find(given.stack, given.outputs)
        site.check_unused()
    except TrainingError as cause:
        sys.stderr.write(f"python -m drills.aws: {cause}\n")
        return cause.exit_status
    return drill(site)


def find(stack: str | None, outputs: str | None) -> Site:
    """Return the site of the stack that is up; raise as `choose` does."""
    if not (stack or outputs) and os.environ.get(CLUSTER_VARIABLE):
        raise UsageError(f"{CLUSTER_VARIABLE}: names a bucket; the checks need the stack's outputs: unset it")
    outputs = str(Path(outputs).expanduser().absolute()) if outputs else None  # the commands run in other folders
    cluster = choose(stack, outputs, local=False, compose=False)
    jobs = cluster.jobs(say)
    if cluster.stack is None or not isinstance(jobs, RemoteJobs):
        raise UsageError("the checks need a stack on AWS; --stack or --outputs names it")
    info = aws.workers(cluster.stack)
    if WORKERS not in info["groups"] or not info["groups"][WORKERS]["max"]:
        raise UsageError("the stack can have no GPU worker; pulumi config set maxWorkers 1 && pulumi up")
    flags = [word for name, value in (("--stack", stack), ("--outputs", outputs)) if value for word in (name, value)]
    return Site(cluster.stack, info, jobs, flags)


def drill(site: Site) -> int:
    """Make the checks, undo their changes, print the block, and return the exit status."""
    rows: list[tuple[str, str, str]] = []
    status = 0
    try:
        with stoppable(), site.undo:
            for name, check in CHECKS.items():
                say(f"{name}: {(check.__doc__ or '').rstrip('.')}")
                rows.append((name, "ended", "interrupted"))
                started = time.monotonic()
                passed, answer = attempt(site, check)
                rows[-1] = (name, f"{RESULTS[passed]}, {time.monotonic() - started:.0f} s", answer)
            say("ending the drill's run and undoing its changes")
    except KeyboardInterrupt as stop:
        status = exit_status_of(stop)
    finally:
        sys.stdout.write(block(site, rows))
    return status or int(bool(site.left) or any("FAIL" in result for _, result, _ in rows))


def attempt(site: Site, check: Callable[[Site], Answer]) -> Answer:
    """Make a check; an error of AWS or of a command is its answer, and says nothing about AWS if it was denied."""
    try:
        return check(site)
    except NotStarted as cause:
        return None, one_line(cause)
    except TrainingError as cause:
        is_denied = isinstance(cause, Refused) and cause.code in DENIED
        return False, f"not checked: {one_line(cause)}" if is_denied else one_line(cause)


def block(site: Site, rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the text for an issue, without the number of the account."""
    group = site.info["groups"][WORKERS]
    lines = [
        f"ray-on-ecs {version('ray-on-ecs')}, Python {platform.python_version()}, {site.stack.region}, "
        f"{'/'.join(group['types'])}, {'Spot' if group['spot'] else 'On-Demand'}, "
        f"{len(site.info['groups'])} node groups, {time.strftime('%Y-%m-%d')}",
        "",
        "| check | result | AWS |",
        "|---|---|---|",
        *(f"| {name} | {result} | {answer.replace('|', '/')} |" for name, result, answer in rows),
        *(f"\n{line}" for line in site.left),
        "",
    ]
    return re.sub(r"\b\d{12}\b", "ACCOUNT", "\n".join(lines))


def say(line: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
