"""`ray-on-ecs doctor`: checks between this machine and the cluster, each with its line.

A failed one raises a Problem or a Notice, or any TrainingError, which is a problem, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import click

from ray_on_ecs.aws import DENIED
from ray_on_ecs.cli.cluster_flags import cluster_flags
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws, scale_in, session
from ray_on_ecs.cluster.aws_status import Group, Service, groups_line, read_groups, read_services
from ray_on_ecs.cluster.clusters import CLUSTER_VARIABLE, Cluster, RemoteCluster, StackCluster, choose
from ray_on_ecs.cluster.clusters import HEAD as HEAD_CLUSTER
from ray_on_ecs.cluster.history import list_folders
from ray_on_ecs.cluster.stack import Stack, find
from ray_on_ecs.cluster.wake import clock, publish
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import ResourceError, StackNotFound, TrainingError, UsageError, one_line
from ray_on_ecs.jobs.documents import HeadState
from ray_on_ecs.jobs.remote import SILENT_SECONDS, RemoteJobs, is_asleep
from ray_on_ecs.node import labels
from ray_on_ecs.node.metrics import head_requested
from ray_on_ecs.node.ray_status import HEAD, nodes_of
from ray_on_ecs.starting.cause import DEPLOYMENT_FAILED

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MARKS = {OK: "ok", WARNING: "! ", FAILED: "✗ ", SKIPPED: "\N{EN DASH} "}
ANSWER_SECONDS = 5  # of AWS
PULUMI_SECONDS = 20.0  # it reads a remote state
UP = "pulumi up"
LOG_IN = "aws sso login    # or: export AWS_PROFILE=NAME, or AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…"


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
    cluster: Cluster = field(init=False)
    stack: Stack = field(init=False)
    head: HeadState = field(init=False)
    is_asleep: bool = False
    workers: ClusterInfo = field(init=False)
    services: dict[str, Service] = field(default_factory=dict)
    groups: dict[str, Group | None] = field(default_factory=dict)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@cluster_flags
def command(as_json: bool, flags: dict[str, Any]) -> int:
    """Check everything between here and the cluster, and say what to type; exit status 1 if something is wrong."""
    _shorten_timeouts()
    states: dict[str, str] = {}
    results = []
    findings = Findings(flags)
    address = os.environ.get(CLUSTER_VARIABLE) if not (flags["stack"] or flags["outputs"]) else None
    checks = ON_AWS
    if flags["local"]:
        checks = ON_THIS_MACHINE
    elif flags["compose"] or address:
        checks = ON_BUCKET if address != HEAD_CLUSTER else ON_BUCKET[:2]  # the others are about its connection
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
        caller = aws.call(findings.stack, "sts", "get_caller_identity")
    except UsageError as cause:
        raise Problem(str(cause), LOG_IN) from cause
    return f"{caller['Arn']} in account {caller['Account']}"


def parameters(findings: Findings) -> str:
    """Read the SSM parameters with Ray's token and the cluster's description, which only the right account has."""
    stack = findings.stack
    try:
        findings.workers = aws.workers(stack)
        try:
            aws.token(stack)
        except aws.Refused as refused:
            raise Notice(
                f"access denied to {stack.token_parameter} ({one_line(refused)}); dashboard and notebook need "
                "ssm:GetParameter for it, and kms:Decrypt if the stack has kmsKeyArn"
            ) from refused
    except aws.Refused as refused:
        raise Problem(
            f"access denied to {stack.cluster_info_parameter} ({one_line(refused)}); ask for ssm:GetParameter"
        ) from refused
    except ResourceError as cause:
        raise Problem(str(cause), UP) from cause
    return "Ray's token and the cluster's description can be read"


def workers(findings: Findings) -> str:
    """Look for an unhealthy instance of the workers, and for Auto Scaling groups that are missing or suspended."""
    findings.groups = groups = read_groups(findings.stack, findings.workers)
    line = groups_line(groups)
    if None in groups.values():
        raise Problem(line, UP)
    if any(group.unhealthy or group.suspended for group in groups.values() if group):
        raise Notice(line)
    return line


def services(findings: Findings) -> str:
    """Look for ECS services without all of their tasks."""
    stack = findings.stack
    findings.services = services = read_services(stack, findings.workers, findings.groups)
    missing = [kind for kind in stack.services if kind not in services]
    if missing:
        raise Problem(f"ECS service not found: {', '.join(missing)}", UP)
    line = ", ".join(f"{kind} {each.running} of {each.desired} running" for kind, each in services.items())
    faults = {kind: each.fault for kind, each in services.items() if each.fault}
    if not faults:
        return line
    has_failed = not services[HEAD].running or any(fault.startswith(DEPLOYMENT_FAILED) for fault in faults.values())
    raise (Problem if has_failed else Notice)(
        f"{line}; {'; '.join(f'{kind}: {fault}' for kind, fault in faults.items())}",
        f"aws logs tail --since 1h --region {stack.region} {stack.log_group}",
    )


def idle(findings: Findings) -> str:
    """Look for what keeps idle workers running: GPUs without work stay billed."""
    nodes = nodes_of(findings.head.ray) if hasattr(findings, "head") else None
    found, refused = scale_in.read(findings.stack, findings.workers, findings.services, findings.groups, nodes)
    line = scale_in.in_words(found) or "no worker is configured"
    if hindered := [each for each in found.values() if each.is_hindered]:
        raise Notice(line, next((each.fix for each in hindered if each.fix), ""))
    if refused:
        raise Notice(f"{line}; not known: {'; '.join(f'{action} {why}' for action, why in refused.items())}")
    return line


def head_instance(findings: Findings) -> str:
    """Look up the head's instance in Session Manager, for dashboard, notebook and shell."""
    if findings.is_asleep:
        return "none while the head sleeps; dashboard, notebook and shell wake it"
    instance_id = aws.head_instance(findings.stack)
    if not instance_id:
        raise Notice("the head has no task on an instance: it is starting; dashboard, notebook and shell need it")
    filters = [{"Key": "InstanceIds", "Values": [instance_id]}]
    answer = aws.call(findings.stack, "ssm", "describe_instance_information", Filters=filters)
    listed = answer["InstanceInformationList"]
    state = listed[0]["PingStatus"] if listed else "not registered"
    if state != "Online":
        raise Notice(
            f"Session Manager does not reach {instance_id} ({state}): it is starting, which takes a minute, or was "
            "replaced, or its network does not reach AWS; dashboard, notebook and shell need it",
            UP,
        )
    return f"{instance_id} is connected to Session Manager"


def ray(findings: Findings) -> str:
    """Look at this machine's jobs."""
    findings.cluster = choose(**findings.flags)
    findings.cluster.jobs().list_jobs()
    return "scripts need none on this machine; a Ray program starts it"


def cluster(findings: Findings) -> str:
    """Find the cluster that the flags or the environment name."""
    findings.cluster = choose(**findings.flags)
    if isinstance(findings.cluster, RemoteCluster):
        return f"{findings.cluster.cluster_name}, by {findings.cluster.name}"
    return findings.cluster.name


def head(findings: Findings) -> str:
    """Read the head's state, and send it an empty request."""
    jobs = findings.cluster.jobs()
    if not isinstance(jobs, RemoteJobs):
        raise Problem("this is the head; ask it from another machine")
    findings.head, age = jobs.state()
    findings.is_asleep = is_asleep(findings.head, age)
    if age > SILENT_SECONDS and not findings.is_asleep:
        raise Problem(f"the head wrote its state {timedelta(seconds=round(age))} ago: it is being replaced, or hangs")
    version = findings.head.ray.get("ray_version")
    line = f"wrote its state {age:.0f} s ago"
    if findings.is_asleep:
        line = f"asleep since {clock(age)}, {findings.cluster.command('run')} wakes it"
    try:
        jobs.check_requests(is_answered=not findings.is_asleep)
    except TrainingError as cause:
        raise Notice(f"{line}, but takes no request of yours ({cause})") from cause
    try:
        if findings.head.wake:
            publish(findings.head.wake, [head_requested(0)])  # wakes nothing
    except TrainingError as cause:
        raise Notice(f"{line}, but your runs can't wake it when it sleeps: {cause}") from cause
    return line if findings.is_asleep else line + (f"; Ray {version}" if version else ", and waits for Ray")


def nodes(findings: Findings) -> str:
    """Look for nodes that are missing."""
    if findings.is_asleep:
        return "none while the head sleeps"
    count = sum(node["kind"] != HEAD for node in findings.head.ray.get("nodes", ()))
    line = f"{count} and the head"
    expected = sum(service.running for kind, service in findings.services.items() if kind != HEAD)
    if expected > count:
        raise Notice(f"{line}, and ECS runs {expected} tasks of them: they are starting, or have not joined Ray")
    return line


def code(findings: Findings) -> str:
    """Compare the code of the image with this package."""
    remote, local = findings.head.code, labels.fingerprint()
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


def plugin(findings: Findings) -> str:
    """Look for the plugin, which dashboard, notebook and shell need."""
    try:
        return session.plugin_version()
    except TrainingError as cause:
        raise Notice(f"{cause}; dashboard, notebook and shell need it") from cause


class Check(NamedTuple):
    """Check of one part of the way to the cluster, and the checks that must have passed before it."""

    name: str
    look: Callable[[Findings], str]
    needs: tuple[str, ...] = ()


OF_NODES, OF_CODE = Check("nodes", nodes, ("head",)), Check("code", code, ("head",))
ON_THIS_MACHINE = (Check("Ray", ray), Check("storage", storage, ("Ray",)))
ON_BUCKET = (
    Check("cluster", cluster),
    Check("bucket", storage, ("cluster",)),
    Check("head", head, ("bucket",)),
    OF_NODES,
    OF_CODE,
)
ON_AWS = (
    Check("stack", stack),
    Check("credentials", credentials, ("stack",)),
    Check("bucket", storage, ("credentials",)),
    Check("parameters", parameters, ("credentials",)),
    Check("workers", workers, ("parameters",)),
    Check("services", services, ("parameters",)),
    Check("head", head, ("bucket",)),
    OF_NODES,
    Check("scale-in", idle, ("parameters",)),
    OF_CODE,
    Check("Session Manager plugin", plugin),
    Check("head's instance", head_instance, ("services",)),
)
