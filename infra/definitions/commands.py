"""Session Manager documents, and the shell commands that the stack exports.

All access goes through AWS Systems Manager: the stack accepts no connection from the internet.
https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-schema.html
"""

from __future__ import annotations

import json
from typing import Any

from ray_on_ecs.contract import DASHBOARD_PORT, HEAD_CONTAINER, HEAD_REQUESTED, NOTEBOOK_PORT

Document = dict[str, Any]
# Shell in the head's container, for `ray status` or `ray job list`.
SHELL = f"sudo docker exec -it $({HEAD_CONTAINER}) bash"
# Private DNS name of the head, or address of a node.
HOST = r"^[A-Za-z0-9.-]{3,253}$"
LOCAL_PORT = r"^[0-9]{1,5}$"


def train(gpus: int) -> str:
    """Shell command that submits the packaged Ray Train job once the head is healthy, and streams its log.

    The job survives a dropped session, and the same command with the run's name follows it again. It waits for a worker
    on each GPU, since instances that are still pulling the image have not joined the cluster.
    """
    workers = f" --num-workers {gpus} --use-gpu" if gpus else ""
    wait = f'while c=$({HEAD_CONTAINER}); [ -z "$c" ]; do echo waiting for the Ray head to start; sleep 10; done'
    return f"{wait}; sudo docker exec -it $c ray-on-ecs run ray_train_ddp.py{workers}"


def interactive(description: str, command: str) -> Document:
    """Session document for one fixed, interactive command."""
    return {
        "schemaVersion": "1.0",
        "description": description,
        "sessionType": "InteractiveCommands",
        "properties": {"linux": {"commands": command, "runAsElevated": False}},
    }


def forwarding() -> Document:
    """Session document that forwards the port of the Ray dashboard or of Jupyter, on the head or a node."""
    ports = "|".join(str(port) for port in (DASHBOARD_PORT, NOTEBOOK_PORT))
    return {
        "schemaVersion": "1.0",
        "description": "Port forwarding to the Ray dashboard or Jupyter",
        "sessionType": "Port",
        "parameters": {
            "host": _parameter("DNS name of the head, or address of a node", HOST),
            "portNumber": _parameter("Remote port", f"^({ports})$"),
            "localPortNumber": _parameter("Local port; 0 selects a free port", LOCAL_PORT),
        },
        "properties": {
            "type": "LocalPortForwarding",
            "host": "{{ host }}",
            "portNumber": "{{ portNumber }}",
            "localPortNumber": "{{ localPortNumber }}",
        },
    }


def instance_of(region: str, group: str) -> str:
    """Shell expression for the ID of the running instance of an Auto Scaling group."""
    filters = f"Name=tag:aws:autoscaling:groupName,Values={group} Name=instance-state-name,Values=running"
    query = "--query 'Reservations[0].Instances[0].InstanceId' --output text"
    return f"$(aws ec2 describe-instances --region {region} --filters {filters} {query})"


def wake(region: str, namespace: str) -> str:
    """Shell command that wakes a head that sleeps."""
    metric = f"--metric-name {HEAD_REQUESTED} --value 1 --storage-resolution 1"
    return f"aws cloudwatch put-metric-data --region {region} --namespace {namespace} {metric}"


def session(region: str, instance_id: str, document: str) -> str:
    """Shell command that starts a session with a document without parameters."""
    return f"aws ssm start-session --region {region} --target {instance_id} --document-name {document}"


def dashboard(region: str, instance_id: str, head_host: str, document: str) -> str:
    """Shell command that forwards the Ray dashboard to the same local port, through the head's instance to its task."""
    port = str(DASHBOARD_PORT)
    parameters = {"host": [head_host], "portNumber": [port], "localPortNumber": [port]}
    quoted = f"'{json.dumps(parameters, separators=(',', ':'))}'"
    return f"{session(region, instance_id, document)} --parameters {quoted}"


def token(region: str, parameter_name: str) -> str:
    """Shell command that prints the Ray token, for the dashboard's login."""
    return (
        f"aws ssm get-parameter --region {region} --name {parameter_name} --with-decryption"
        " --query Parameter.Value --output text"
    )


def _parameter(description: str, pattern: str) -> dict[str, str]:
    return {"type": "String", "description": description, "allowedPattern": pattern}
