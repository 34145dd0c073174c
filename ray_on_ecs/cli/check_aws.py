"""Checks of this machine's programs and of the stack in AWS, for `ray-on-ecs doctor`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from email.utils import parsedate_to_datetime
from typing import Any

import requests

from ray_on_ecs.cli.findings import ANSWER_SECONDS, DENIED, UP, Findings, Notice, Problem
from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.clusters import StackCluster
from ray_on_ecs.cluster.costs import idle_monthly_usd
from ray_on_ecs.cluster.stack import PulumiError, Stack, find
from ray_on_ecs.contract import ON_DEMAND, RUNS_PREFIX, SPOT, VCPU_QUOTAS
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, counted, one_line

PROGRAM_SECONDS = 10.0
PULUMI_SECONDS = 20.0
# AWS refuses signatures that are older, or younger, than five minutes.
CLOCK_SECONDS, CLOCK_NOTICEABLE_SECONDS = 300, 60
LOG_IN = "aws sso login    # or: aws configure, or: export AWS_PROFILE=NAME"
PLUGIN_FILES = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"


def aws_cli(findings: Findings) -> str:
    """Run the AWS CLI."""
    mac = "brew install awscli"
    file = f"awscli-exe-linux-{platform.machine()}.zip"
    linux = f"curl -O https://awscli.amazonaws.com/{file} && unzip {file} && sudo ./aws/install"
    return _program("aws", mac if sys.platform == "darwin" else linux).split()[0]


def session_manager_plugin(findings: Findings) -> str:
    """Run the plugin of the AWS CLI."""
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


def stack(findings: Findings) -> str:
    """Find the stack."""
    outputs = findings.flags["outputs"]
    try:
        stack = find(findings.flags["stack"], outputs, PULUMI_SECONDS)
    except TrainingError as cause:
        raise Problem(str(cause), _stack_fix(cause, outputs)) from cause
    findings.stack, findings.cluster = stack, StackCluster(stack)
    return f"stack {stack.name} in {stack.region}, cluster {stack.cluster_name}, from {outputs or 'Pulumi'}"


def _stack_fix(cause: TrainingError, outputs: str | None) -> str:
    if isinstance(cause, ResourceError):
        return UP
    if outputs:
        return f"pulumi stack output --json > {outputs}"
    if shutil.which("pulumi") is None:
        return "brew install pulumi" if sys.platform == "darwin" else "curl -fsSL https://get.pulumi.com | sh"
    return cause.fix if isinstance(cause, PulumiError) else "pulumi stack ls"


def clock(findings: Findings) -> str:
    """Compare this machine's clock with AWS's."""
    offset = _clock_offset(findings.stack.region)
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


def credentials(findings: Findings) -> str:
    """Call AWS with the user's credentials."""
    try:
        caller = aws.call("sts", findings.stack, "get_caller_identity")
    except UsageError as cause:
        raise Problem(str(cause), LOG_IN) from cause
    return f"{caller['Arn']} in account {caller['Account']}"


def region(findings: Findings) -> str:
    """Look up the stack's region."""
    region = findings.stack.region
    try:
        described = aws.call("ec2", findings.stack, "describe_regions", RegionNames=[region], AllRegions=True)[
            "Regions"
        ]
    except aws.Refused as refused:
        if refused.code in DENIED:
            raise
        raise Problem(f"region {region} not found ({one_line(refused)})", "aws ec2 describe-regions") from refused
    if described and described[0].get("OptInStatus") == "not-opted-in":
        raise Problem(f"{region} is not enabled in this account", f"aws account enable-region --region-name {region}")
    other = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or region
    return region if other == region else f"{region}, the stack's (AWS_REGION, {other}, is for other commands)"


def parameters(findings: Findings) -> str:
    """Read the SSM parameters with Ray's token and the cluster's description, which only the right account has."""
    try:
        aws.token(findings.stack)
        findings.workers = aws.workers(findings.stack)
    except aws.Refused as refused:
        if refused.code == "ParameterNotFound":
            raise Problem(str(aws.stack_not_found(findings.stack)), UP) from refused
        raise Problem(
            f"access denied to {findings.stack.token_parameter} and {findings.stack.cluster_info_parameter} "
            f"({one_line(refused)}); ask for ssm:GetParameter, and kms:Decrypt if the stack has kmsKeyArn"
        ) from refused
    except ResourceError as cause:
        raise Problem(str(cause), UP) from cause
    return "Ray's token and the cluster's description can be read"


def quota(findings: Findings) -> str:
    """Compare the vCPU quotas with the workers' vCPUs."""
    workers, stack = findings.workers, findings.stack
    maximum = aws.group(stack, workers["group"])["MaxSize"]
    types = aws.call("ec2", stack, "describe_instance_types", InstanceTypes=workers["types"])["InstanceTypes"]
    lines = []
    for quota_code, needed in _needed_vcpus(types, maximum, spot=workers["spot"]).items():
        arguments = {"ServiceCode": "ec2", "QuotaCode": quota_code}
        quota = aws.call("service-quotas", stack, "get_service_quota", **arguments)["Quota"]
        line = f"{quota.get('QuotaName', quota_code)}: {quota['Value']:g} vCPUs"
        if needed > quota["Value"]:
            raise Problem(
                f"{line}, and {maximum} x {' or '.join(workers['types'])} need {needed}; AWS decides on a request",
                "aws service-quotas request-service-quota-increase --service-code ec2 "
                f"--quota-code {quota_code} --desired-value {needed} --region {stack.region}",
            )
        lines.append(f"{line}, {needed} needed")
    return "; ".join(lines) or "no known quota for these instances"


def _needed_vcpus(types: list[dict[str, Any]], maximum: int, *, spot: bool) -> dict[str, int]:
    """Return the vCPUs that each quota must allow for the maximum of workers, all of its largest type.

    With spot, the on-demand workers have another quota, which is left out.
    """
    needed: Counter[str] = Counter()
    for instance_type in types:
        quota = _quota_code(instance_type["InstanceType"], spot=spot)
        if quota:
            needed[quota] = max(needed[quota], maximum * instance_type["VCpuInfo"]["DefaultVCpus"])
    return dict(needed)


def _quota_code(instance_type: str, *, spot: bool) -> str | None:
    """Return Service Quotas' code of the quota that counts an instance type; None for other families."""
    market_of_workers = SPOT if spot else ON_DEMAND
    for quota, _, families, market in VCPU_QUOTAS:
        if market == market_of_workers and re.match(rf"({families})\d", instance_type):
            return quota
    return None


def bucket(findings: Findings) -> str:
    """List, read and write the runs' prefix of the bucket, as other commands do."""
    from ray_on_ecs.cluster.clusters import StackCluster
    from ray_on_ecs.storage.bucket import NoBucket, StorageFault

    place = f"{findings.stack.bucket}/{RUNS_PREFIX}/"
    try:
        denied = StackCluster(findings.stack).storage("").denied()
    except NoBucket as cause:
        raise Problem(f"bucket {findings.stack.bucket} does not exist in this account", UP) from cause
    except StorageFault as cause:
        raise Problem(str(cause)) from cause
    if not denied:
        return f"{place} can be read and written"
    if {"s3:ListBucket", "s3:GetObject"}.isdisjoint(denied):
        raise Notice(f"{place} can be read, which is enough to fetch, but {', '.join(denied)} is denied")
    raise Problem(f"access denied to {place}; ask for {', '.join(denied)}, without which runs and fetch fail")


def services(findings: Findings) -> str:
    """Look for ECS services without all of their tasks."""
    stack = findings.stack
    try:
        described = aws.services(stack)
    except aws.Refused as refused:
        if refused.code == "ClusterNotFoundException":
            raise Problem(str(aws.stack_not_found(stack)), UP) from refused
        raise
    missing = [kind for kind in stack.services if kind not in described]
    if missing:
        raise Problem(f"ECS service not found: {', '.join(missing)}", UP)
    findings.services = described
    findings.running = {kind: service["runningCount"] for kind, service in described.items()}
    counts = [
        f"{kind} {service['runningCount']} of {service['desiredCount']} running" for kind, service in described.items()
    ]
    line = ", ".join(counts)
    unsteady = [service for service in described.values() if service["runningCount"] < service["desiredCount"]]
    if not unsteady:
        return line
    reasons = [aws.last_stop(stack, service) for service in unsteady]
    reasons += [one_line(event["message"]) for service in unsteady for event in service.get("events", ())]
    reason = next(filter(None, reasons), "no event yet")
    if not findings.running.get("head"):
        raise Problem(f"{line}: the head is starting or being replaced; ECS says: {reason}", _tail_logs(stack))
    raise Notice(f"{line}; ECS says: {reason}", _tail_logs(stack))


def workers(findings: Findings) -> str:
    """Look for a failed deployment or an unhealthy instance of the workers."""
    stack = findings.stack
    for kind, service in findings.services.items():
        fault = aws.deployment_fault(service)
        if fault:
            raise Problem(f"{kind}: {fault}", _tail_logs(stack))
    group = aws.group(stack, findings.workers["group"])
    unhealthy = aws.unhealthy(group)
    if unhealthy:
        raise Notice(
            f"{', '.join(unhealthy)} is marked unhealthy, such as for a GPU that fails; Auto Scaling replaces it",
            _tail_logs(stack),
        )
    idle = idle_monthly_usd(findings.workers)
    cost = "" if idle is None else f"; the stack's instances cost {idle:.0f} USD a month while idle"
    return f"{counted(len(group['Instances']), 'instance')} of GPU workers{cost}"


def _tail_logs(stack: Stack) -> str:
    return f"aws logs tail --since 1h --region {stack.region} {stack.log_group}"


def head_instance(findings: Findings) -> str:
    """Look up the head's instance in Session Manager."""
    stack = findings.stack
    instance_id = aws.head_instance(stack)
    filters = [{"Key": "InstanceIds", "Values": [instance_id]}]
    listed = aws.call("ssm", stack, "describe_instance_information", Filters=filters)["InstanceInformationList"]
    state = listed[0]["PingStatus"] if listed else "not registered"
    if state != "Online":
        raise Problem(
            f"Session Manager does not reach {instance_id} ({state}): it is starting, which takes a minute, or was "
            "replaced, or its network does not reach AWS",
            UP,
        )
    return f"{instance_id} is connected to Session Manager"
