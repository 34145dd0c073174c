"""AWS API calls about a stack, through boto3."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_on_ecs import spot_prices
from ray_on_ecs.aws import Refused, client, credentials_error, session, translated
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, parse_cluster_info
from ray_on_ecs.errors import HeadUnavailable, ResourceError, StackNotFound, TrainingError, one_line
from ray_on_ecs.node.errors import GpuError
from ray_on_ecs.run.zone_failover import newest_failure

CONNECT_SECONDS: float = 10
READ_SECONDS: float = 30
ATTEMPTS: int = 3
# Prefix of a task's stoppedReason after a scale-in or a deployment.
SCALING = "Scaling activity initiated"
# Exit status of `ray-worker` after a GPU fault.
GPU_EXIT_STATUS = GpuError.exit_status
# Number of scaling activities to read, the newest first.
ACTIVITIES = 20


def call(service: str, stack: Stack, method: str, **arguments: Any) -> Any:
    """Call AWS.

    Raises:
        UsageError: Credentials are missing or have expired.
        ResourceError: AWS can't be reached, or refuses; the message has its code.
    """
    with translated(service):
        return getattr(client(service, region_name=stack.region, **limits()), method)(**arguments)


def limits() -> dict[str, Any]:
    """Return the timeouts and attempts of a command's calls."""
    return {"connect_seconds": CONNECT_SECONDS, "read_seconds": READ_SECONDS, "attempts": ATTEMPTS}


def token(stack: Stack) -> str:
    """Return Ray's token.

    Raises:
        UsageError: Credentials are missing or have expired.
        StackNotFound: The stack is down.
        ResourceError: AWS refuses.
    """
    try:
        response = call("ssm", stack, "get_parameter", Name=stack.token_parameter, WithDecryption=True)
    except Refused as cause:
        if cause.code == "ParameterNotFound":
            raise stack_not_found(stack) from cause
        raise
    return response["Parameter"]["Value"]


def stack_not_found(stack: Stack) -> StackNotFound:
    """Return the error for a stack whose resources don't exist."""
    return StackNotFound(
        f"stack {stack.name} is down, or in another account: its resources are not in {stack.region}; pulumi up "
        "creates them, AWS_PROFILE selects the account"
    )


def head_instance(stack: Stack) -> str:
    """Return the EC2 instance of the head's task; without one, the instance in the outputs, which may be older."""
    cluster = stack.cluster_name
    with suppress(Refused, LookupError):
        task_arns = call("ecs", stack, "list_tasks", cluster=cluster, serviceName=stack.services["head"])["taskArns"]
        if task_arns:
            tasks = call("ecs", stack, "describe_tasks", cluster=cluster, tasks=task_arns)["tasks"]
            arns = [task["containerInstanceArn"] for task in tasks if task.get("containerInstanceArn")]
            response = call("ecs", stack, "describe_container_instances", cluster=cluster, containerInstances=arns[:1])
            return response["containerInstances"][0]["ec2InstanceId"]
    return stack.head_instance_id


def explain_head(stack: Stack) -> ResourceError | None:
    """Return ECS's reason why the head doesn't answer, or None if ECS can't be asked."""
    try:
        response = call(
            "ecs", stack, "describe_services", cluster=stack.cluster_name, services=[stack.services["head"]]
        )
    except Refused as cause:
        return stack_not_found(stack) if cause.code == "ClusterNotFoundException" else None
    except TrainingError:
        return None
    services = [service for service in response["services"] if service["status"] == "ACTIVE"]
    if not services:
        return stack_not_found(stack)
    [service] = services
    if not service["runningCount"]:
        events = service.get("events") or [{"message": "no event yet"}]
        message = one_line(events[0]["message"])
        return HeadUnavailable(f"the head's task is not running: it is starting or being replaced; ECS says: {message}")
    return HeadUnavailable(
        "the head's task runs, and Ray doesn't answer yet: it is starting, or being replaced; try again in a minute"
    )


def workers(stack: Stack) -> ClusterInfo:
    """Return the stack's description of its workers.

    Raises:
        TrainingError: AWS refuses, or the parameter has other content.
    """
    response = call("ssm", stack, "get_parameter", Name=stack.cluster_info_parameter)
    info = parse_cluster_info(response["Parameter"]["Value"])
    if info is None:
        raise ResourceError(f"{stack.cluster_info_parameter} has no valid cluster info; pulumi up writes it")
    return info


def spot_usd(stack: Stack, info: ClusterInfo) -> dict[str, float]:
    """Return EC2's current spot price of each of the workers' types, in dollars an hour.

    Raises:
        TrainingError: AWS refuses.
    """
    return spot_prices.by_type(call("ec2", stack, "describe_spot_price_history", **spot_prices.question(info)))


def services(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return ECS's description of each kind of node's service, without missing and inactive ones.

    Raises:
        TrainingError: AWS refuses.
    """
    names = list(stack.services.values())
    response = call("ecs", stack, "describe_services", cluster=stack.cluster_name, services=names)
    active = {service["serviceName"]: service for service in response["services"] if service["status"] == "ACTIVE"}
    return {kind: active[name] for kind, name in stack.services.items() if name in active}


def deployment_fault(service: dict[str, Any]) -> str | None:
    """Return the reason why a service's newest deployment failed, or None if it hasn't.

    Args:
        service: A service as `services` returns it.
    """
    deployments = service.get("deployments", ())
    failed = [deployment for deployment in deployments if deployment.get("rolloutState") == "FAILED"]
    if not failed:
        return None
    reason = one_line(failed[0].get("rolloutStateReason") or "ECS gives no reason").removesuffix(".")
    return f"the last deployment failed: {reason}; pulumi config set redeployWorkers WORD and pulumi up try again"


def last_stop(stack: Stack, service: dict[str, Any]) -> str | None:
    """Return the reason why a service's last task stopped, or None without one.

    Tasks that a scale-in or a deployment stopped don't count. ECS forgets a stopped task after an hour.

    Raises:
        TrainingError: AWS refuses.
    """
    cluster = stack.cluster_name
    task_filter = {"serviceName": service["serviceName"], "desiredStatus": "STOPPED"}
    task_arns = call("ecs", stack, "list_tasks", cluster=cluster, **task_filter)["taskArns"]
    if not task_arns:
        return None
    tasks = call("ecs", stack, "describe_tasks", cluster=cluster, tasks=task_arns)["tasks"]
    stopped = [task for task in tasks if task.get("stoppedAt")]
    stopped = [task for task in stopped if not task.get("stoppedReason", "").startswith(SCALING)]
    if not stopped:
        return None
    newest = max(stopped, key=lambda task: task["stoppedAt"])
    if GPU_EXIT_STATUS in [container.get("exitCode") for container in newest.get("containers", ())]:
        return "the last task stopped because a GPU is missing or does not compute (its log says which)"
    return f"the last task stopped: {one_line(newest.get('stoppedReason') or 'ECS gives no reason')}"


def group(stack: Stack, name: str) -> dict[str, Any]:
    """Return EC2's description of an Auto Scaling group.

    Raises:
        TrainingError: AWS refuses, or the group does not exist.
    """
    groups = call("autoscaling", stack, "describe_auto_scaling_groups", AutoScalingGroupNames=[name])[
        "AutoScalingGroups"
    ]
    if not groups:
        raise ResourceError(f"Auto Scaling group {name} not found; pulumi up creates it")
    return groups[0]


def unhealthy(group: dict[str, Any]) -> list[str]:
    """Return the unhealthy instances of an Auto Scaling group, which it replaces."""
    return [member["InstanceId"] for member in group["Instances"] if member["HealthStatus"] == "Unhealthy"]


def launch_failure(stack: Stack, workers: ClusterInfo) -> str | None:
    """Return EC2's message if the workers' last launch failed within a day, else None.

    Raises:
        TrainingError: AWS refuses.
    """
    response = call(
        "autoscaling",
        stack,
        "describe_scaling_activities",
        AutoScalingGroupName=workers["group"],
        MaxRecords=ACTIVITIES,
    )
    activities = response["Activities"]
    subnets = [zone["subnet_id"] for zone in workers["zones"]]
    failure = newest_failure(activities, subnets, datetime.now(UTC) - timedelta(days=1))
    return one_line(failure.message) if failure else None


def scaling_alarms(stack: Stack, kind: str) -> dict[str, dict[str, Any]]:
    """Return the alarms that scale the GPU or the CPU workers: `short` and `idle`.

    Raises:
        TrainingError: AWS refuses.
    """
    prefix = scaling_prefix(stack.cluster_name, kind)
    response = call("cloudwatch", stack, "describe_alarms", AlarmNamePrefix=prefix, AlarmTypes=["MetricAlarm"])
    return {alarm["AlarmName"].removeprefix(prefix): alarm for alarm in response["MetricAlarms"]}


def scaling_prefix(cluster_name: str, kind: str) -> str:
    """Return the prefix of the scaling alarms' names (see infra/node_scaling.py)."""
    return f"{cluster_name}-{kind}-"


def instance(stack: Stack, instance_id: str) -> dict[str, Any]:
    """Return EC2's description of an instance.

    Raises:
        TrainingError: AWS refuses, or the instance does not exist.
    """
    reservations = call("ec2", stack, "describe_instances", InstanceIds=[instance_id])["Reservations"]
    if not reservations:
        raise ResourceError(f"EC2 instance {instance_id} not found")
    return reservations[0]["Instances"][0]


def credentials() -> Any:
    """Return the current credentials: `access_key`, `secret_key` and, if they are temporary, `token`.

    Raises:
        UsageError: Credentials are missing.
    """
    with translated("sts"):
        refreshable = session().get_credentials()
        if refreshable is None:
            raise credentials_error("none found")
        return refreshable.get_frozen_credentials()


def variables() -> dict[str, str]:
    """Return this process's environment with the current credentials, for another program.

    Raises:
        UsageError: Credentials are missing.
    """
    current = credentials()
    environment = dict(os.environ)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):  # of other credentials
        environment.pop(name, None)
    environment |= {"AWS_ACCESS_KEY_ID": current.access_key, "AWS_SECRET_ACCESS_KEY": current.secret_key}
    if current.token:
        environment["AWS_SESSION_TOKEN"] = current.token
    return environment


def shell_command(stack: Stack) -> list[str]:
    """Return the command that opens a shell in the head's container."""
    return [
        *("aws", "ssm", "start-session", "--region", stack.region, "--target", head_instance(stack)),
        *("--document-name", stack.shell_document),
    ]
