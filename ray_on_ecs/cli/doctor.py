"""`ray-on-ecs doctor`: everything between this machine and the cluster, one check after another."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import click
import requests

from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws, clusters, session
from ray_on_ecs.cluster.clusters import COMPOSE_S3, Cluster, Head, StackCluster, choose, cluster_flags
from ray_on_ecs.cluster.costs import idle_monthly_usd
from ray_on_ecs.cluster.nodes import ALIVE, head_code, nodes
from ray_on_ecs.cluster.stack import PulumiError, Stack, find
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.contract import ON_DEMAND, RUNS_PREFIX, SPOT, VCPU_QUOTAS
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, counted, one_line
from ray_on_ecs.node import code

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MARKS = {OK: "ok", WARNING: "! ", FAILED: "✗ ", SKIPPED: "\N{EN DASH} "}
# All of it takes less than a minute: after this no check is begun, and none waits longer than the rest.
BEGIN_SECONDS = 35.0
PROGRAM_SECONDS = 10.0
ANSWER_SECONDS = 5
PULUMI_SECONDS = 20.0
# The other commands have more.
PATIENCE = (
    (aws, {"CONNECT_SECONDS": ANSWER_SECONDS, "READ_SECONDS": ANSWER_SECONDS, "ATTEMPTS": 2}),
    (session, {"OPEN_SECONDS": 10.0}),
    (clusters, {"REQUEST_SECONDS": 10.0}),
)
# AWS refuses signatures that are older, or younger, than five minutes.
CLOCK_SECONDS, CLOCK_NOTICEABLE_SECONDS = 300, 60
EXITED_SECONDS = 3600
REFUSED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "UnknownOperationException"),
    *("NotImplemented", "InvalidAction", "NoSuchResourceException"),
}
UP = "pulumi up"
LOG_IN = "aws sso login    # or: aws configure, or: export AWS_PROFILE=NAME"
PLUGIN_FILES = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"


class Problem(Exception):
    """Failed check: the fault, and the command to type."""

    def __init__(self, line: str, fix: str = "") -> None:
        super().__init__(line)
        self.fix = fix


class Notice(Problem):
    """A check that found something to know about, which need not be wrong."""


@dataclass
class Examined:
    """Results of the checks so far.

    Attributes:
        flags: The flags that name the cluster.
        opened: Closes what the checks have opened.
        cluster: The cluster.
        head: Its head, once it has answered.
        account: The AWS account.
        workers: The stack's description of its workers.
        services: ECS's description of the service of each kind of node.
        running: How many tasks ECS runs of each kind of node.
    """

    flags: dict[str, Any]
    opened: ExitStack
    cluster: Cluster | None = None
    head: Head | None = None
    account: str = ""
    workers: ClusterInfo | None = None
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """The stack, which an earlier check has found."""
        assert self.cluster is not None
        assert self.cluster.stack is not None
        return self.cluster.stack


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes:
        name: Name of the check.
        look: Returns what is well; raises a Problem, or any TrainingError.
        needs: The checks that must have passed before it.
    """

    name: str
    look: Callable[[Examined], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Finding of a check, and the command to type if it is not well."""

    check: str
    state: str
    line: str
    type: str = ""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@cluster_flags
def command(as_json: bool, flags: dict[str, Any]) -> int:
    """Check everything between here and the cluster, and say what to type; exit status 1 if something is wrong."""
    for module, seconds in PATIENCE:
        vars(module).update(seconds)
    results = []
    with ExitStack() as opened:
        for result in examine(Examined(flags, opened)):
            results.append(result)
            if not as_json:
                _print(result)
    failed = any(result.state == FAILED for result in results)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(result) for result in results]})
    return int(failed)


def _print(result: Result) -> None:
    out.print(f"{MARKS[result.state]}  {result.check}: {result.line}", markup=False)
    if result.type:
        out.print(f"      {result.type}", markup=False)


def examine(found: Examined) -> Iterator[Result]:
    """Yield the result of each check as it ends."""
    begun_at = time.monotonic()
    states: dict[str, str] = {}
    for check in _checks(found.flags):
        missing = [name for name in check.needs if states.get(name) in (FAILED, SKIPPED)]
        if missing:
            result = Result(check.name, SKIPPED, f"not checked without {missing[0]}")
        elif time.monotonic() - begun_at > BEGIN_SECONDS:
            result = Result(check.name, SKIPPED, "not checked, the others took too long")
        else:
            result = _look(check, found)
        states[check.name] = result.state
        yield result


def _look(check: Check, found: Examined) -> Result:
    try:
        return Result(check.name, OK, check.look(found))
    except Notice as notice:
        return Result(check.name, WARNING, str(notice), notice.fix)
    except Problem as problem:
        return Result(check.name, FAILED, str(problem), problem.fix)
    except aws.Refused as refused:
        if refused.code in REFUSED:
            return Result(check.name, WARNING, f"unknown, AWS does not let you look ({one_line(refused)})")
        return Result(check.name, FAILED, one_line(refused))
    except TrainingError as cause:
        return Result(check.name, FAILED, str(cause))


def _checks(flags: dict[str, Any]) -> tuple[Check, ...]:
    ray = ("Ray",)
    if flags["local"] or flags["compose"]:
        of_image = (Check("code", _code, ray),) if flags["compose"] else ()
        return (
            Check("Ray", _ray),
            Check("version", _version, ray),
            Check("nodes", _nodes, ray),
            *of_image,
            Check("storage", _storage, ray),
        )
    on_aws = ("credentials",)
    return (
        Check("AWS CLI", _aws_cli),
        Check("Session Manager plugin", _plugin),
        Check("stack", _stack),
        Check("clock", _clock, ("stack",)),
        Check("credentials", _credentials, ("stack", "clock")),
        Check("region", _region, on_aws),
        Check("parameters", _parameters, on_aws),
        Check("quota", _quota, ("parameters",)),
        Check("bucket", _bucket, on_aws),
        Check("services", _services, ("parameters",)),
        Check("workers", _workers, ("services",)),
        Check("head's instance", _instance, ("services",)),
        Check("Ray", _ray, ("AWS CLI", "Session Manager plugin", "head's instance")),
        Check("version", _version, ray),
        Check("nodes", _nodes, ray),
        Check("code", _code, ray),
    )


def _aws_cli(found: Examined) -> str:
    mac = "brew install awscli"
    file = f"awscli-exe-linux-{platform.machine()}.zip"
    linux = f"curl -O https://awscli.amazonaws.com/{file} && unzip {file} && sudo ./aws/install"
    return _program("aws", mac if sys.platform == "darwin" else linux).split()[0]


def _plugin(found: Examined) -> str:
    bits = "arm64" if platform.machine() in ("aarch64", "arm64") else "64bit"
    if sys.platform == "darwin":
        fix = "brew install --cask session-manager-plugin"
    elif shutil.which("dpkg"):
        deb = "session-manager-plugin.deb"
        fix = f"curl -O {PLUGIN_FILES}/ubuntu_{bits}/{deb} && sudo dpkg -i {deb}"
    else:
        fix = f"sudo yum install -y {PLUGIN_FILES}/linux_{bits}/session-manager-plugin.rpm"
    return _program("session-manager-plugin", fix)


def _program(name: str, fix: str) -> str:
    """Return the version of a program."""
    try:
        done = subprocess.run(
            [name, "--version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as cause:
        raise Problem(f"command not found: {name}", fix) from cause
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise Problem(f"{name} --version does not run ({one_line(cause)})", fix) from cause
    if done.returncode:
        raise Problem(f"{name} --version fails ({one_line(done.stderr or done.stdout)})", fix)
    return one_line(done.stdout)


def _stack(found: Examined) -> str:
    flags = found.flags
    try:
        stack = find(flags["stack"], flags["outputs"], PULUMI_SECONDS)
    except TrainingError as cause:
        raise Problem(str(cause), _stack_fix(cause, flags["outputs"])) from cause
    found.cluster = StackCluster(stack)
    origin = flags["outputs"] or "Pulumi"
    return f"{found.cluster.name} in {stack.region}, cluster {stack.cluster_name}, from {origin}"


def _stack_fix(cause: TrainingError, outputs: str | None) -> str:
    if isinstance(cause, ResourceError):
        return UP
    if outputs:
        return f"pulumi stack output --json > {outputs}"
    if shutil.which("pulumi") is None:
        return "brew install pulumi" if sys.platform == "darwin" else "curl -fsSL https://get.pulumi.com | sh"
    return cause.fix if isinstance(cause, PulumiError) else "pulumi stack ls"


def _clock(found: Examined) -> str:
    offset = _clock_offset(found.stack.region)
    line = f"this machine is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} AWS"
    fix = "sudo sntp -sS time.apple.com" if sys.platform == "darwin" else "sudo timedatectl set-ntp true"
    if abs(offset) > CLOCK_SECONDS:
        raise Problem(f"{line}, which refuses signatures that are more than five minutes off", fix)
    if abs(offset) > CLOCK_NOTICEABLE_SECONDS:
        raise Notice(line, fix)
    return f"within {max(1, abs(offset)):.0f} s of AWS's"


def _clock_offset(region: str) -> float:
    """Return by how many seconds this machine is ahead of AWS; any answer has the time, also a refusal."""
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    variables = (os.environ.get("AWS_ENDPOINT_URL_STS"), os.environ.get("AWS_ENDPOINT_URL"))
    url = next(filter(None, variables), f"https://sts.{region}.{suffix}")
    try:
        answer = requests.head(url, timeout=ANSWER_SECONDS, allow_redirects=False)
        return time.time() - parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (requests.RequestException, KeyError, ValueError) as cause:
        raise Problem(f"AWS can't be reached ({one_line(cause)})", f"curl -I {url}") from cause


def _credentials(found: Examined) -> str:
    try:
        caller = aws.call("sts", found.stack, "get_caller_identity")
    except UsageError as cause:
        raise Problem(str(cause), LOG_IN) from cause
    found.account = caller["Account"]
    return f"{caller['Arn']} in account {found.account}"


def _region(found: Examined) -> str:
    region = found.stack.region
    try:
        described = aws.call("ec2", found.stack, "describe_regions", RegionNames=[region], AllRegions=True)["Regions"]
    except aws.Refused as refused:
        if refused.code in REFUSED:
            raise
        raise Problem(f"AWS knows no region {region} ({one_line(refused)})", "aws ec2 describe-regions") from refused
    if described and described[0].get("OptInStatus") == "not-opted-in":
        raise Problem(f"{region} is not enabled in this account", f"aws account enable-region --region-name {region}")
    other = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or region
    return region if other == region else f"{region}, the stack's (AWS_REGION, {other}, is for other commands)"


def _parameters(found: Examined) -> str:
    """SSM parameters with Ray's token and the cluster's description, readable only in the right account."""
    try:
        aws.token(found.stack)
        found.workers = aws.workers(found.stack)
    except aws.Refused as refused:
        if refused.code == "ParameterNotFound":
            raise Problem(str(aws.gone(found.stack)), UP) from refused
        raise Problem(
            f"you may not read {found.stack.token_parameter} and {found.stack.cluster_info_parameter} "
            f"({one_line(refused)}); ask for ssm:GetParameter, and kms:Decrypt if the stack has kmsKeyArn"
        ) from refused
    except ResourceError as cause:
        raise Problem(str(cause), UP) from cause
    return "Ray's token and the cluster's description can be read"


def _quota(found: Examined) -> str:
    assert found.workers is not None
    workers, stack = found.workers, found.stack
    most = aws.group(stack, workers["group"])["MaxSize"]
    types = aws.call("ec2", stack, "describe_instance_types", InstanceTypes=workers["types"])["InstanceTypes"]
    lines = []
    for quota_code, needed in _needed_vcpus(types, most, spot=workers["spot"]).items():
        given = {"ServiceCode": "ec2", "QuotaCode": quota_code}
        quota = aws.call("service-quotas", stack, "get_service_quota", **given)["Quota"]
        line = f"{quota.get('QuotaName', quota_code)}: {quota['Value']:g} vCPUs"
        if needed > quota["Value"]:
            raise Problem(
                f"{line}, and {most} x {' or '.join(workers['types'])} need {needed}; AWS decides on a request",
                "aws service-quotas request-service-quota-increase --service-code ec2 "
                f"--quota-code {quota_code} --desired-value {needed} --region {stack.region}",
            )
        lines.append(f"{line}, {needed} needed")
    return "; ".join(lines) or "none is known for these instances"


def _needed_vcpus(types: list[dict[str, Any]], most: int, *, spot: bool) -> dict[str, int]:
    """Return the vCPUs that each quota must allow if all workers are of its dearest type.

    With spot, the on-demand workers have another quota, which is left out.
    """
    needed: Counter[str] = Counter()
    for instance_type in types:
        if quota := quota_code(instance_type["InstanceType"], spot=spot):
            needed[quota] = max(needed[quota], most * instance_type["VCpuInfo"]["DefaultVCpus"])
    return dict(needed)


def quota_code(instance_type: str, *, spot: bool) -> str | None:
    """Return Service Quotas' code of the quota that counts an instance type; None for other families."""
    wanted = SPOT if spot else ON_DEMAND
    for quota, _, families, market in VCPU_QUOTAS:
        if market == wanted and re.match(rf"({families})\d", instance_type):
            return quota
    return None


def _bucket(found: Examined) -> str:
    stack, prefix = found.stack, f"{RUNS_PREFIX}/"
    missing = []
    try:
        aws.call("s3", stack, "head_bucket", Bucket=stack.bucket)
    except aws.Refused as refused:
        if refused.code in ("404", "NoSuchBucket"):
            raise Problem(f"bucket {stack.bucket} does not exist in this account", UP) from refused
    try:
        listed = aws.call("s3", stack, "list_objects_v2", Bucket=stack.bucket, Prefix=prefix, MaxKeys=1)
    except aws.Refused as refused:
        raise Problem(
            f"you may not list {stack.bucket} ({refused.code}); ask for s3:ListBucket and s3:GetObject, without which "
            "runs and fetch show nothing"
        ) from refused
    for item in listed.get("Contents", ()):
        missing += _refused(stack, "s3:GetObject", "head_object", Key=item["Key"])
    if missing:
        raise Problem(f"you may not read {stack.bucket}/{prefix}; ask for {missing[0]}, without which fetch fails")
    probe = f"{prefix}.doctor-{uuid4().hex}"
    missing = _refused(stack, "s3:PutObject", "put_object", Key=probe, Body=b"")
    missing += [] if missing else _refused(stack, "s3:DeleteObject", "delete_object", Key=probe)
    if missing:
        raise Notice(f"{stack.bucket}/{prefix} can be read, which is enough to fetch, but not {missing[0]}")
    return f"{stack.bucket}/{prefix} can be read and written"


def _refused(stack: Stack, action: str, method: str, **given: Any) -> list[str]:
    """Return the action if AWS refuses it."""
    try:
        aws.call("s3", stack, method, Bucket=stack.bucket, **given)
    except aws.Refused:
        return [action]
    return []


def _services(found: Examined) -> str:
    stack = found.stack
    try:
        described = aws.services(stack)
    except aws.Refused as refused:
        if refused.code == "ClusterNotFoundException":
            raise Problem(str(aws.gone(stack)), UP) from refused
        raise
    if lost := [kind for kind in stack.services if kind not in described]:
        raise Problem(f"ECS has no service of the {', '.join(lost)} any more", UP)
    found.services = described
    found.running = {kind: service["runningCount"] for kind, service in described.items()}
    line = ", ".join(
        f"{kind} {service['runningCount']} of {service['desiredCount']} running" for kind, service in described.items()
    )
    unsteady = [service for service in described.values() if service["runningCount"] < service["desiredCount"]]
    if not unsteady:
        return line
    stops = [stop for service in unsteady if (stop := aws.last_stop(stack, service))]
    events = [one_line(event["message"]) for service in unsteady for event in service.get("events", ())]
    said = next(iter([*stops, *events]), "nothing yet")
    logs = _tail_logs(stack)
    if not found.running.get("head"):
        raise Problem(f"{line}: the head is starting or being replaced; ECS says: {said}", logs)
    raise Notice(f"{line}; ECS says: {said}", logs)


def _workers(found: Examined) -> str:
    assert found.workers is not None
    stack = found.stack
    for kind, service in found.services.items():
        if fault := aws.deployment_fault(service):
            raise Problem(f"{kind}: {fault}", _tail_logs(stack))
    group = aws.group(stack, found.workers["group"])
    if unhealthy := aws.unhealthy(group):
        raise Notice(
            f"{', '.join(unhealthy)} is marked unhealthy, such as for a GPU that fails; Auto Scaling replaces it",
            _tail_logs(stack),
        )
    idle = idle_monthly_usd(found.workers)
    cost = "" if idle is None else f"; the stack's instances cost {idle:.0f} USD a month while idle"
    return f"{counted(len(group['Instances']), 'instance')} of GPU workers{cost}"


def _tail_logs(stack: Stack) -> str:
    return f"aws logs tail --since 1h --region {stack.region} {stack.log_group}"


def _instance(found: Examined) -> str:
    stack = found.stack
    instance_id = aws.head_instance(stack)
    given = {"Filters": [{"Key": "InstanceIds", "Values": [instance_id]}]}
    listed = aws.call("ssm", stack, "describe_instance_information", **given)["InstanceInformationList"]
    state = listed[0]["PingStatus"] if listed else "not registered"
    if state != "Online":
        raise Problem(
            f"Session Manager does not reach {instance_id} ({state}): it is starting, which takes a minute, or was "
            "replaced, or its network does not reach AWS",
            UP,
        )
    return f"{instance_id} is connected to Session Manager"


def _ray(found: Examined) -> str:
    if found.cluster is None:
        found.cluster = choose(**found.flags)
    found.head = found.opened.enter_context(found.cluster.connect())
    return f"answers at {found.head.url}" + (", and takes the token" if found.head.token else "")


def _version(found: Examined) -> str:
    there, here = _head(found).get("/api/version")["ray_version"], version("ray")
    if there != here:
        raise Notice(f"Ray {there} there, Ray {here} here", f"pip install 'ray[default]=={there}'")
    return f"Ray {there}, here as there"


def _nodes(found: Examined) -> str:
    known = nodes(_head(found))
    alive = [node for node in known if node["state"] == ALIVE]
    line = f"{len(alive) - 1} and the head"
    date = _head(found).date()
    now = parsedate_to_datetime(date).timestamp() if date else time.time()
    gone = [node for node in known if node["state"] != ALIVE and now - node["end_time_ms"] / 1000 < EXITED_SECONDS]
    lost = [node for node in gone if "unexpected" in (node["state_message"] or "").lower()]
    if lost:
        why = one_line(lost[-1]["state_message"])
        raise Notice(f"{line}; {len(lost)} ended unexpectedly within an hour, the last one: {why}")
    expected = sum(number for kind, number in found.running.items() if kind != "head")
    if expected > len(alive) - 1:
        raise Notice(f"{line}, and ECS runs {expected} tasks of them: they are starting, or Ray has not let them in")
    return f"{line}; {len(gone)} have left within an hour" if gone else line


def _code(found: Examined) -> str:
    there, here = head_code(_head(found)), code.fingerprint()
    build = "docker compose --file docker/compose.yaml up --build --detach" if found.flags["compose"] else UP
    if there != here:
        raise Notice(f"the image has other code ({there}) than is here ({here})", build)
    return f"the image has the code that is here ({here})"


def _storage(found: Examined) -> str:
    cluster = found.cluster
    assert cluster is not None
    if found.flags["compose"]:
        try:
            requests.head(COMPOSE_S3, timeout=ANSWER_SECONDS)
        except requests.RequestException as cause:
            fix = "docker compose --file docker/compose.yaml up --detach"
            raise Problem(f"compose's S3 does not answer at {COMPOSE_S3}", fix) from cause
    cluster.storage("doctor").check_writable()
    return f"{cluster.storage_path} can be written"


def _head(found: Examined) -> Head:
    assert found.head is not None
    return found.head
