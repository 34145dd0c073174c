"""`ray-on-ecs doctor`: checks between this machine and the cluster, each with its line.

A failed one raises a Problem or a Notice, or any TrainingError, which is a problem, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from ray_on_ecs.cli.cluster_flags import cluster_flags
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws, session
from ray_on_ecs.cluster import head as cluster_head
from ray_on_ecs.cluster.aws_status import DEPLOYMENT_FAILED, HEAD, Service, read_group, read_services
from ray_on_ecs.cluster.clusters import Cluster, LocalCluster, StackCluster, choose
from ray_on_ecs.cluster.head import ALIVE, Head
from ray_on_ecs.cluster.history import list_folders
from ray_on_ecs.cluster.stack import Stack, find
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import ResourceError, StackNotFound, TrainingError, UsageError, one_line
from ray_on_ecs.node import labels

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MARKS = {OK: "ok", WARNING: "! ", FAILED: "✗ ", SKIPPED: "\N{EN DASH} "}
# AWS's error codes for missing permissions, and of emulators that lack an operation.
DENIED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "UnknownOperationException"),
    *("NotImplemented", "InvalidAction"),
}
ANSWER_SECONDS = 5  # of AWS
PULUMI_SECONDS = 20.0  # it reads a remote state
UP = "pulumi up"
LOG_IN = "aws sso login    # or: aws configure, or: export AWS_PROFILE=NAME"


class Problem(Exception):
    """Failed check: the fault, and the command that fixes it."""

    def __init__(self, line: str, fix: str = "") -> None:
        super().__init__(line)
        self.fix = fix


class Notice(Problem):
    """Finding that need not be a fault."""


@dataclass
class Findings:
    """Results of the checks so far; a check that needs one runs after the check that sets it has passed."""

    flags: dict[str, Any]
    connections: ExitStack
    cluster: Cluster = field(init=False)
    stack: Stack = field(init=False)
    head: Head = field(init=False)
    workers: ClusterInfo = field(init=False)
    services: dict[str, Service] = field(default_factory=dict)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@cluster_flags
def command(as_json: bool, flags: dict[str, Any]) -> int:
    """Check everything between here and the cluster, and say what to type; exit status 1 if something is wrong."""
    _shorten_timeouts()
    states: dict[str, str] = {}
    results = []
    with ExitStack() as connections:
        findings = Findings(flags, connections)
        if flags["local"]:
            checks = AT_ADDRESS if os.environ.get("RAY_API_SERVER_ADDRESS") else ON_THIS_MACHINE
        else:
            checks = ON_COMPOSE if flags["compose"] else ON_AWS
        for check in checks:
            missing = [name for name in check.needs if states.get(name) in (FAILED, SKIPPED)]
            if missing:
                state, line, fix = SKIPPED, f"not checked without {missing[0]}", ""
            else:
                state, line, fix = _outcome(check, findings)
            states[check.name] = state
            results.append({"check": check.name, "state": state, "line": line, "type": fix})
            if not as_json:
                out.print(f"{MARKS[state]}  {check.name}: {line}")
                if fix:
                    out.print(f"      {fix}")
    has_failed = FAILED in states.values()
    if as_json:
        print_json({"ok": not has_failed, "checks": results})
    return int(has_failed)


def _shorten_timeouts() -> None:
    """Let the checks fail sooner than other commands: several may have to."""
    aws.CONNECT_SECONDS = aws.READ_SECONDS = ANSWER_SECONDS
    aws.ATTEMPTS = 2
    session.OPEN_SECONDS = cluster_head.REQUEST_SECONDS = 10.0


def _outcome(check: Check, findings: Findings) -> tuple[str, str, str]:
    """Return the state of a check, its line, and the command to type if it has not passed."""
    try:
        return OK, check.look(findings), ""
    except Notice as notice:
        return WARNING, str(notice), notice.fix
    except Problem as problem:
        return FAILED, str(problem), problem.fix
    except aws.Refused as refused:
        if refused.code in DENIED:
            return WARNING, f"unknown, AWS denies access ({one_line(refused)})", ""
        return FAILED, one_line(refused), ""
    except TrainingError as cause:
        return FAILED, str(cause), UP if isinstance(cause, StackNotFound) else ""


def stack(findings: Findings) -> str:
    """Find the stack."""
    outputs = findings.flags["outputs"]
    try:
        findings.stack = stack = find(findings.flags["stack"], outputs, PULUMI_SECONDS)
    except ResourceError as cause:
        raise Problem(str(cause), UP) from cause
    except UsageError as cause:
        write = f"pulumi stack output --json > {outputs}"
        raise Problem(str(cause), write if outputs else getattr(cause, "fix", "pulumi stack ls")) from cause
    findings.cluster = StackCluster(stack)
    source = outputs or f"Pulumi in {stack.project}"
    return f"stack {stack.name} in {stack.region}, cluster {stack.cluster_name}, from {source}"


def credentials(findings: Findings) -> str:
    """Call AWS with the user's credentials."""
    try:
        caller = aws.call("sts", findings.stack, "get_caller_identity")
    except UsageError as cause:
        raise Problem(str(cause), LOG_IN) from cause
    return f"{caller['Arn']} in account {caller['Account']}"


def parameters(findings: Findings) -> str:
    """Read the SSM parameters with Ray's token and the cluster's description, which only the right account has."""
    stack = findings.stack
    try:
        aws.token(stack)
        findings.workers = aws.workers(stack)
    except aws.Refused as refused:
        raise Problem(
            f"access denied to {stack.token_parameter} and {stack.cluster_info_parameter} ({one_line(refused)}); ask "
            "for ssm:GetParameter, and kms:Decrypt if the stack has kmsKeyArn"
        ) from refused
    except ResourceError as cause:
        raise Problem(str(cause), UP) from cause
    return "Ray's token and the cluster's description can be read"


def services(findings: Findings) -> str:
    """Look for ECS services without all of their tasks."""
    stack = findings.stack
    findings.services = services = read_services(stack)
    missing = [kind for kind in stack.services if kind not in services]
    if missing:
        raise Problem(f"ECS service not found: {', '.join(missing)}", UP)
    line = ", ".join(f"{kind} {each.running} of {each.desired} running" for kind, each in services.items())
    faults = {kind: each.fault for kind, each in services.items() if each.fault}
    if not faults:
        return line
    has_failed = not services[HEAD].running or any(fault.startswith(DEPLOYMENT_FAILED) for fault in faults.values())
    raise (Problem if has_failed else Notice)(
        f"{line}; ECS says of {'; of '.join(f'{kind}: {fault}' for kind, fault in faults.items())}",
        f"aws logs tail --since 1h --region {stack.region} {stack.log_group}",
    )


def workers(findings: Findings) -> str:
    """Look for a failed launch or an unhealthy instance of the workers."""
    group = read_group(findings.stack, findings.workers)
    if group.unhealthy or group.failure:
        raise Notice(str(group))
    return str(group)


def scale_in(findings: Findings) -> str:
    """Look at the alarms that stop idle workers: without them GPUs without work stay billed."""
    stack = findings.stack
    stopping = {
        kind: aws.scaling_prefix(stack.cluster_name, kind) + "idle"
        for kind, scale in findings.workers["scaling"].items()
        if scale["idle_minutes"] and scale["min"] < scale["max"]
    }
    names = list(stopping.values())
    found = aws.call("cloudwatch", stack, "describe_alarms", AlarmNames=names, AlarmTypes=["MetricAlarm"])
    actions = {alarm["AlarmName"]: alarm["ActionsEnabled"] for alarm in found["MetricAlarms"]}
    for kind, name in stopping.items():
        if name not in actions:
            raise Notice(f"idle {kind} keep running: alarm {name} is missing", UP)
        if not actions[name]:
            fix = f"aws cloudwatch enable-alarm-actions --region {stack.region} --alarm-names {name}"
            raise Notice(f"idle {kind} keep running: the actions of alarm {name} are disabled", fix)
    return f"alarms stop idle {' and '.join(stopping)}" if stopping else "idle workers keep running, as configured"


def head_instance(findings: Findings) -> str:
    """Look up the head's instance in Session Manager."""
    instance_id = aws.head_instance(findings.stack)
    filters = [{"Key": "InstanceIds", "Values": [instance_id]}]
    answer = aws.call("ssm", findings.stack, "describe_instance_information", Filters=filters)
    listed = answer["InstanceInformationList"]
    state = listed[0]["PingStatus"] if listed else "not registered"
    if state != "Online":
        raise Problem(
            f"Session Manager does not reach {instance_id} ({state}): it is starting, which takes a minute, or was "
            "replaced, or its network does not reach AWS",
            UP,
        )
    return f"{instance_id} is connected to Session Manager"


def ray(findings: Findings) -> str:
    """Connect to the head."""
    if findings.flags["local"] or findings.flags["compose"]:
        findings.cluster = choose(**findings.flags)
    if isinstance(findings.cluster, LocalCluster):
        with findings.cluster.connect() as jobs:
            jobs.list_jobs()
        return "scripts need none on this machine; a Ray program starts it"
    head = findings.head = findings.connections.enter_context(findings.cluster.connect_to_ray())
    return f"answers at {head.url}" + (", and accepts the token" if head.token else "")


def nodes(findings: Findings) -> str:
    """Look for nodes that died or are missing."""
    listed = findings.head.nodes()
    alive = [node for node in listed if node["state"] == ALIVE]
    line = f"{len(alive) - 1} and the head"
    now = time.time()
    dead = [node for node in listed if node["state"] != ALIVE and now - node["end_time_ms"] / 1000 < 3600]
    failed = [node for node in dead if "unexpected" in (node["state_message"] or "").lower()]
    if failed:
        reason = one_line(failed[-1]["state_message"])
        raise Notice(f"{line}; {len(failed)} ended unexpectedly within an hour, the last one: {reason}")
    expected = sum(service.running for kind, service in findings.services.items() if kind != HEAD)
    if expected > len(alive) - 1:
        raise Notice(f"{line}, and ECS runs {expected} tasks of them: they are starting, or have not joined Ray")
    return f"{line}; {len(dead)} have left within an hour" if dead else line


def code(findings: Findings) -> str:
    """Compare the code of the image with this package."""
    heads = [node for node in findings.head.nodes() if node["is_head_node"] and node["state"] == ALIVE]
    remote, local = heads[0]["labels"].get(labels.CODE) if heads else None, labels.fingerprint()
    build = "docker compose --file docker/compose.yaml up --build --detach" if findings.flags["compose"] else UP
    if remote != local:
        raise Notice(f"the code in the image ({remote}) differs from the code here ({local})", build)
    return f"the code in the image is the code here ({local})"


def storage(findings: Findings) -> str:
    """List, read and write the storage path through the connection of `runs`, `fetch` and `run`."""
    cluster = findings.cluster
    root = cluster.storage("")
    folders = list_folders(cluster, root)
    for name, files in folders.files.items():
        try:
            root.sibling(name).read(next(iter(files)))
        except FileNotFoundError:
            continue  # the run has just been deleted, or its lock released
        except OSError as cause:
            raise Problem(f"{cluster.storage_path} can be listed, but not read ({one_line(cause)})") from cause
        break
    try:
        root.check_writable()
    except TrainingError as cause:
        if cluster.stack is None:
            raise
        raise Notice(f"{cluster.storage_path} can be read, which is enough to fetch, but {cause}") from cause
    return f"{cluster.storage_path} can be read and written"


class Check(NamedTuple):
    """Check of one part of the way to the cluster, and the checks that must have passed before it."""

    name: str
    look: Callable[[Findings], str]
    needs: tuple[str, ...] = ()


OF_NODES, OF_CODE = Check("nodes", nodes, ("Ray",)), Check("code", code, ("Ray",))
OF_STORAGE = Check("storage", storage, ("Ray",))
ON_THIS_MACHINE = (Check("Ray", ray), OF_STORAGE)
AT_ADDRESS = (Check("Ray", ray), OF_NODES, OF_STORAGE)
ON_COMPOSE = (Check("Ray", ray), OF_NODES, OF_CODE, OF_STORAGE)
ON_AWS = (
    Check("Session Manager plugin", lambda _: session.plugin_version()),
    Check("stack", stack),
    Check("credentials", credentials, ("stack",)),
    Check("parameters", parameters, ("credentials",)),
    Check("bucket", storage, ("credentials",)),
    Check("services", services, ("parameters",)),
    Check("workers", workers, ("services",)),
    Check("scale-in", scale_in, ("parameters",)),
    Check("head's instance", head_instance, ("services",)),
    Check("Ray", ray, ("Session Manager plugin", "head's instance")),
    OF_NODES,
    OF_CODE,
)
