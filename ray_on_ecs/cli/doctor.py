"""`ray-on-ecs doctor`: everything between this machine and the cluster, one check after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import click

from ray_on_ecs.cli import checks
from ray_on_ecs.cli.checks import ANSWER_SECONDS, Findings, Notice, Problem
from ray_on_ecs.cli.cluster_flags import cluster_flags
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws, head, session
from ray_on_ecs.errors import StackNotFound, TrainingError, one_line

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MARKS = {OK: "ok", WARNING: "! ", FAILED: "✗ ", SKIPPED: "\N{EN DASH} "}
# AWS's error codes for missing permissions, and of emulators that lack an operation.
DENIED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "UnknownOperationException"),
    *("NotImplemented", "InvalidAction"),
}
# All checks take less than a minute: after this time none is started.
START_SECONDS = 35.0


class Check(NamedTuple):
    """Check of one part of the way to the cluster, and the checks that must have passed before it."""

    name: str
    look: Callable[[Findings], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Result of a check, and the command to type if it has not passed."""

    check: str
    state: str
    line: str
    type: str = ""


RAY = (Check("version", checks.version, ("Ray",)), Check("nodes", checks.nodes, ("Ray",)))
CODE = Check("code", checks.code, ("Ray",))
STORAGE = Check("storage", checks.storage, ("Ray",))
ON_THIS_MACHINE = (Check("Ray", checks.ray), STORAGE)
AT_ADDRESS = (Check("Ray", checks.ray), *RAY, STORAGE)
ON_COMPOSE = (Check("Ray", checks.ray), *RAY, CODE, STORAGE)
ON_AWS = (
    Check("AWS CLI", partial(checks.program, name="aws", instructions=session.AWS_CLI)),
    Check(
        "Session Manager plugin", partial(checks.program, name="session-manager-plugin", instructions=session.PLUGIN)
    ),
    Check("stack", checks.stack),
    Check("credentials", checks.credentials, ("stack",)),
    Check("parameters", checks.parameters, ("credentials",)),
    Check("bucket", checks.storage, ("credentials",)),
    Check("services", checks.services, ("parameters",)),
    Check("workers", checks.workers, ("services",)),
    Check("scale-in", checks.scale_in, ("parameters",)),
    Check("head's instance", checks.head_instance, ("services",)),
    Check("Ray", checks.ray, ("AWS CLI", "Session Manager plugin", "head's instance")),
    *RAY,
    CODE,
)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@cluster_flags
def command(as_json: bool, flags: dict[str, Any]) -> int:
    """Check everything between here and the cluster, and say what to type; exit status 1 if something is wrong."""
    _shorten_timeouts()
    results = []
    with ExitStack() as connections:
        for result in _run_checks(Findings(flags, connections)):
            results.append(result)
            if not as_json:
                out.print(f"{MARKS[result.state]}  {result.check}: {result.line}")
                if result.type:
                    out.print(f"      {result.type}")
    has_failed = any(result.state == FAILED for result in results)
    if as_json:
        print_json({"ok": not has_failed, "checks": [asdict(result) for result in results]})
    return int(has_failed)


def _shorten_timeouts() -> None:
    """Let the checks fail sooner than other commands, so that all of them take less than a minute."""
    aws.CONNECT_SECONDS = aws.READ_SECONDS = ANSWER_SECONDS
    aws.ATTEMPTS = 2
    session.OPEN_SECONDS = 10.0
    head.REQUEST_SECONDS = 10.0


def _run_checks(findings: Findings) -> Iterator[Result]:
    """Yield the result of each check as it ends."""
    flags = findings.flags
    checks = ON_COMPOSE if flags["compose"] else ON_AWS
    if flags["local"]:
        checks = AT_ADDRESS if os.environ.get("RAY_API_SERVER_ADDRESS") else ON_THIS_MACHINE
    started_at = time.monotonic()
    states: dict[str, str] = {}
    for check in checks:
        missing = [name for name in check.needs if states.get(name) in (FAILED, SKIPPED)]
        if missing:
            result = Result(check.name, SKIPPED, f"not checked without {missing[0]}")
        elif time.monotonic() - started_at > START_SECONDS:
            result = Result(check.name, SKIPPED, "not checked, the others took too long")
        else:
            result = _run(check, findings)
        states[check.name] = result.state
        yield result


def _run(check: Check, findings: Findings) -> Result:
    try:
        return Result(check.name, OK, check.look(findings))
    except Notice as notice:
        return Result(check.name, WARNING, str(notice), notice.fix)
    except Problem as problem:
        return Result(check.name, FAILED, str(problem), problem.fix)
    except aws.Refused as refused:
        if refused.code in DENIED:
            return Result(check.name, WARNING, f"unknown, AWS denies access ({one_line(refused)})")
        return Result(check.name, FAILED, one_line(refused))
    except TrainingError as cause:
        return Result(check.name, FAILED, str(cause), checks.UP if isinstance(cause, StackNotFound) else "")
