"""AWS API calls about a stack, through boto3."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from ray_on_ecs.aws import Refused, client, credentials_error, foreign, session, translated
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, parse_cluster_info
from ray_on_ecs.errors import ResourceError, StackNotFound

# As those of a run; `doctor` shortens them.
CONNECT_SECONDS: float = 10
READ_SECONDS: float = 30
ATTEMPTS: int = 3


def call(stack: Stack, service: str, method: str, /, **arguments: Any) -> Any:
    """Call AWS; UsageError for bad credentials, ResourceError if AWS can't be reached or refuses.

    A key that its answer lacks, at any depth, raises ResourceError when it is looked up: another program has answered.
    """
    with translated(service):
        return _answer(service, getattr(client_of(service, stack), method)(**arguments))


def client_of(service: str, stack: Stack) -> Any:
    """Return the client of a service in a stack's region."""
    return client(service, region_name=stack.region, **limits())


def limits() -> dict[str, Any]:
    """Return the timeouts and attempts of a command's calls."""
    return {"connect_seconds": CONNECT_SECONDS, "read_seconds": READ_SECONDS, "attempts": ATTEMPTS}


class _Answer(dict[str, Any]):
    """Part of AWS's answer. A proxy or a portal may have sent it, as AWS's own answers have all their keys."""

    def __init__(self, service: str, items: dict[str, Any]) -> None:
        super().__init__({key: _answer(service, value) for key, value in items.items()})
        self._service = service

    def __missing__(self, key: str) -> Any:
        raise foreign(self._service, f"it has no {key}")


def _answer(service: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _Answer(service, value)
    return [_answer(service, item) for item in value] if isinstance(value, list) else value


def token(stack: Stack) -> str:
    """Return Ray's token; raise as `call` does, and StackNotFound if the stack is down."""
    return _parameter(stack, stack.token_parameter)


def workers(stack: Stack) -> ClusterInfo:
    """Return the stack's description of its workers; raise as `token` does, or if the parameter has other content."""
    info = parse_cluster_info(_parameter(stack, stack.cluster_info_parameter))
    if info is None:
        raise ResourceError(f"{stack.cluster_info_parameter} has no valid cluster info; pulumi up writes it")
    return info


def _parameter(stack: Stack, name: str) -> str:
    try:
        return call(stack, "ssm", "get_parameter", Name=name, WithDecryption=True)["Parameter"]["Value"]
    except Refused as cause:
        if cause.code == "ParameterNotFound":
            raise stack_not_found(stack) from cause
        raise


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
        task_arns = call(stack, "ecs", "list_tasks", cluster=cluster, serviceName=stack.services["head"])["taskArns"]
        if task_arns:
            tasks = call(stack, "ecs", "describe_tasks", cluster=cluster, tasks=task_arns)["tasks"]
            arns = [task["containerInstanceArn"] for task in tasks if task.get("containerInstanceArn")]
            response = call(stack, "ecs", "describe_container_instances", cluster=cluster, containerInstances=arns[:1])
            return response["containerInstances"][0]["ec2InstanceId"]
    return stack.head_instance_id


def user_id(**options: Any) -> str:
    """Return the caller's `aws:userid`, by which IAM's policies name the folder of a user's requests."""
    with translated("sts"):
        return str(_answer("sts", client("sts", **options).get_caller_identity())["UserId"])


def variables() -> dict[str, str]:
    """Return this process's environment with its current credentials, for another program; UsageError without any."""
    with translated("sts"):
        refreshable = session().get_credentials()
        if refreshable is None:
            raise credentials_error("none found")
        current = refreshable.get_frozen_credentials()
    environment = dict(os.environ)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):  # of other credentials
        environment.pop(name, None)
    environment |= {"AWS_ACCESS_KEY_ID": current.access_key, "AWS_SECRET_ACCESS_KEY": current.secret_key}
    if current.token:
        environment["AWS_SESSION_TOKEN"] = current.token
    return environment
