"""What the commands ask AWS about a stack, by boto3."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from ray_on_ecs import spot_prices
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, parse_cluster_info
from ray_on_ecs.errors import HeadUnavailable, ResourceError, StackNotFound, TrainingError, UsageError, one_line
from ray_on_ecs.node.errors import GpuError
from ray_on_ecs.run.zone_failover import newest_failure

# Codes with which services refuse credentials.
BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"),
    *("RequestExpired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure"),
}
CONNECT_SECONDS = 10
READ_SECONDS = 30
ATTEMPTS = 3
# The stopped reason of a task that a scale-in or a deployment ended.
SCALING = "Scaling activity initiated"
# Of `ray-worker`, where a GPU fails.
GPU_EXIT_STATUS = GpuError.exit_status
# Of a group's activities, the newest ones.
ACTIVITIES = 20


def client(service: str, stack: Stack) -> Any:
    """Return a client in the stack's region."""
    from botocore.config import Config

    retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
    settings = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    return _session().client(service, region_name=stack.region, config=settings)


def call(service: str, stack: Stack, method: str, **given: Any) -> Any:
    """Call AWS.

    Raises:
        UsageError: There are no credentials, or they have expired.
        ResourceError: AWS can't be reached, or refuses; the message has its code.
    """
    with _translated(service):
        return getattr(client(service, stack), method)(**given)


@contextmanager
def _translated(service: str) -> Generator[None]:
    """Raise what `call` raises in the place of boto3's errors."""
    from botocore import exceptions

    without_credentials = tuple(
        found
        for name in (
            *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
            *("SSOError", "TokenRetrievalError", "LoginError"),
        )
        if (found := getattr(exceptions, name, None))
    )
    try:
        yield
    except without_credentials as cause:
        raise _no_credentials(one_line(cause)) from cause
    except exceptions.MissingDependencyException as cause:
        raise UsageError(
            f"boto3 lacks a package for your login ({one_line(cause)}); pip install 'boto3[crt]'"
        ) from cause
    except exceptions.ClientError as cause:
        code = cause.response.get("Error", {}).get("Code", "")
        if code in BAD_CREDENTIALS or (code == "AccessDenied" and cause.operation_name == "AssumeRole"):
            raise _no_credentials(one_line(cause)) from cause
        raise Refused(code, f"{service}: {one_line(cause)}") from cause
    except exceptions.BotoCoreError as cause:
        raise ResourceError(f"AWS can't be reached ({one_line(cause)})") from cause


def _no_credentials(reason: str) -> UsageError:
    return UsageError(f"no AWS credentials that work ({reason}); log in, or set AWS_PROFILE")


class Refused(ResourceError):
    """AWS's answer is an error.

    Attributes:
        code: AWS's name of it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def token(stack: Stack) -> str:
    """Return Ray's token.

    Raises:
        UsageError: There are no credentials, or the stack is not up any more.
        ResourceError: AWS refuses.
    """
    try:
        found = call("ssm", stack, "get_parameter", Name=stack.token_parameter, WithDecryption=True)
    except Refused as cause:
        if cause.code == "ParameterNotFound":
            raise gone(stack) from cause
        raise
    return found["Parameter"]["Value"]


def gone(stack: Stack) -> StackNotFound:
    """Return the error for a stack of which there is nothing."""
    return StackNotFound(
        f"stack {stack.name} is down, or in another account: {stack.region} has nothing of it; pulumi up creates it, "
        "AWS_PROFILE chooses the account"
    )


def head_instance(stack: Stack) -> str:
    """Return the instance of the head's task: the outputs may be older than it."""
    try:
        given = {"cluster": stack.cluster_name, "serviceName": stack.services["head"]}
        if tasks := call("ecs", stack, "list_tasks", **given)["taskArns"]:
            described = call("ecs", stack, "describe_tasks", cluster=stack.cluster_name, tasks=tasks)["tasks"]
            instances = [task["containerInstanceArn"] for task in described if task.get("containerInstanceArn")]
            found = call(
                "ecs",
                stack,
                "describe_container_instances",
                cluster=stack.cluster_name,
                containerInstances=instances[:1],
            )["containerInstances"]
            return found[0]["ec2InstanceId"]
    except (Refused, LookupError):
        pass
    return stack.head_instance_id


def explain_head(stack: Stack) -> ResourceError | None:
    """Return why the head doesn't answer, as ECS sees it, or None if ECS doesn't say."""
    try:
        answer = call("ecs", stack, "describe_services", cluster=stack.cluster_name, services=[stack.services["head"]])
        service = next(iter(answer["services"]), {})
    except Refused as cause:
        return gone(stack) if cause.code == "ClusterNotFoundException" else None
    except TrainingError:
        return None
    if service.get("status") != "ACTIVE":
        return gone(stack)
    if not service["runningCount"]:
        last = next((one_line(event["message"]) for event in service.get("events", [])), "no event yet")
        return HeadUnavailable(f"the head's task is not running: it is starting or being replaced; ECS says: {last}")
    return HeadUnavailable(
        "the head's task runs, and Ray doesn't answer yet: it is starting, or being replaced; try again in a minute"
    )


def workers(stack: Stack) -> ClusterInfo:
    """Return what the stack says of its workers.

    Raises:
        TrainingError: AWS refuses, or the parameter says something else.
    """
    found = call("ssm", stack, "get_parameter", Name=stack.cluster_info_parameter)["Parameter"]["Value"]
    if (parsed := parse_cluster_info(found)) is None:
        raise ResourceError(f"{stack.cluster_info_parameter} does not say what the workers are; pulumi up writes it")
    return parsed


def spot_usd(stack: Stack, info: ClusterInfo) -> dict[str, float]:
    """Return EC2's present price of a spot instance of each of the workers' types, in dollars an hour.

    Raises:
        TrainingError: AWS refuses.
    """
    return spot_prices.by_type(call("ec2", stack, "describe_spot_price_history", **spot_prices.question(info)))


def services(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return ECS's description of the service of each kind of node; one that is not there is left out.

    Raises:
        TrainingError: AWS refuses.
    """
    names = {name: kind for kind, name in stack.services.items()}
    answer = call("ecs", stack, "describe_services", cluster=stack.cluster_name, services=list(names))
    there = {names.get(each["serviceName"]): each for each in answer["services"] if each["status"] == "ACTIVE"}
    return {kind: there[kind] for kind in stack.services if kind in there}


def deployment_fault(service: dict[str, Any]) -> str | None:
    """Return why ECS has given up a service's newest deployment, or None if it hasn't.

    Args:
        service: As `services` returns it.
    """
    failed = [each for each in service.get("deployments", ()) if each.get("rolloutState") == "FAILED"]
    if not failed:
        return None
    reason = one_line(failed[0].get("rolloutStateReason") or "ECS gives no reason").removesuffix(".")
    return f"the last deployment failed: {reason}; pulumi config set redeployWorkers WORD and pulumi up try again"


def last_stop(stack: Stack, service: dict[str, Any]) -> str | None:
    """Return why the newest task that a service has lost stopped, or None if ECS knows none.

    ECS forgets a stopped task after an hour.

    Raises:
        TrainingError: AWS refuses.
    """
    given = {"serviceName": service["serviceName"], "desiredStatus": "STOPPED"}
    if not (tasks := call("ecs", stack, "list_tasks", cluster=stack.cluster_name, **given)["taskArns"]):
        return None
    described = call("ecs", stack, "describe_tasks", cluster=stack.cluster_name, tasks=tasks)["tasks"]
    stopped = [
        task for task in described if task.get("stoppedAt") and not task.get("stoppedReason", "").startswith(SCALING)
    ]
    if not stopped:
        return None
    newest = max(stopped, key=lambda task: task["stoppedAt"])
    if GPU_EXIT_STATUS in [container.get("exitCode") for container in newest.get("containers", ())]:
        return "the last task stopped because a GPU is missing or does not compute (its log says which)"
    return f"the last task stopped: {one_line(newest.get('stoppedReason') or 'ECS gives no reason')}"


def group(stack: Stack, name: str) -> dict[str, Any]:
    """Return EC2's description of an Auto Scaling group.

    Raises:
        TrainingError: AWS refuses, or there is no such group.
    """
    found = call("autoscaling", stack, "describe_auto_scaling_groups", AutoScalingGroupNames=[name])
    if not found["AutoScalingGroups"]:
        raise ResourceError(f"there is no Auto Scaling group {name}; pulumi up makes it")
    return found["AutoScalingGroups"][0]


def unhealthy(group: dict[str, Any]) -> list[str]:
    """Return the instances of an Auto Scaling group that it replaces because they are unhealthy."""
    return [member["InstanceId"] for member in group["Instances"] if member["HealthStatus"] == "Unhealthy"]


def launch_failure(stack: Stack, workers: ClusterInfo) -> str | None:
    """Return what EC2 says of the workers' last launch if it failed within a day.

    Raises:
        TrainingError: AWS refuses.
    """
    given = {"AutoScalingGroupName": workers["group"], "MaxRecords": ACTIVITIES}
    activities = call("autoscaling", stack, "describe_scaling_activities", **given)["Activities"]
    subnets = [zone["subnet_id"] for zone in workers["zones"]]
    failure = newest_failure(activities, subnets, datetime.now(UTC) - timedelta(days=1))
    return one_line(failure.message) if failure else None


def scaling_alarms(stack: Stack, kind: str) -> dict[str, dict[str, Any]]:
    """Return the alarms that change the number of the GPU or the CPU workers: `short` and `idle`.

    Raises:
        TrainingError: AWS refuses.
    """
    prefix = scaling_prefix(stack.cluster_name, kind)
    found = call("cloudwatch", stack, "describe_alarms", AlarmNamePrefix=prefix, AlarmTypes=["MetricAlarm"])
    return {alarm["AlarmName"].removeprefix(prefix): alarm for alarm in found["MetricAlarms"]}


def scaling_prefix(cluster_name: str, kind: str) -> str:
    """Return the prefix of these alarms' names (see infra/node_scaling.py)."""
    return f"{cluster_name}-{kind}-"


def instance(stack: Stack, instance_id: str) -> dict[str, Any]:
    """Return EC2's description of an instance.

    Raises:
        TrainingError: AWS refuses, or there is none.
    """
    found = call("ec2", stack, "describe_instances", InstanceIds=[instance_id])["Reservations"]
    if not found:
        raise ResourceError(f"there is no instance {instance_id}")
    return found[0]["Instances"][0]


def credentials() -> Any:
    """Return the present credentials: `access_key`, `secret_key` and, if they are temporary, `token`.

    Raises:
        UsageError: There are none.
    """
    with _translated("sts"):
        found = _session().get_credentials()
        if found is None:
            raise _no_credentials("there are none here")
        return found.get_frozen_credentials()


def variables() -> dict[str, str]:
    """Return the environment in which another program has the same credentials.

    Raises:
        UsageError: There are none.
    """
    found = credentials()
    given = {"AWS_ACCESS_KEY_ID": found.access_key, "AWS_SECRET_ACCESS_KEY": found.secret_key}
    kept = {name: value for name, value in os.environ.items() if name not in ("AWS_PROFILE", "AWS_SESSION_TOKEN")}
    return {**kept, **given, **({"AWS_SESSION_TOKEN": found.token} if found.token else {})}


@cache
def _session() -> Any:
    """Return the one session, whose credentials renew themselves; a new one would find those that were exported."""
    import boto3

    return boto3.Session()


def shell_command(stack: Stack) -> list[str]:
    """Return the command that opens a shell in the head's container."""
    return [
        *("aws", "ssm", "start-session", "--region", stack.region, "--target", head_instance(stack)),
        *("--document-name", stack.shell_document),
    ]
