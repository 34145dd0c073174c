"""Session documents, and the commands that the stack exports, each one shell line ready to paste.

All of them go through AWS Systems Manager: nothing of the stack listens to the internet.
https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-schema.html
"""

from __future__ import annotations

import json
from typing import Any

from ray_on_ecs.contract import DASHBOARD_PORT, HEAD_CONTAINER, NOTEBOOK_PORT

Document = dict[str, Any]
# A shell in the head's container, for `ray status` or `ray job list`.
SHELL = f"sudo docker exec -it $({HEAD_CONTAINER}) bash"
# The name of the head in the VPC, or the address of a node.
HOST = r"^[A-Za-z0-9.-]{3,253}$"
LOCAL_PORT = r"^[0-9]{1,5}$"


def train(gpus: int) -> str:
    """Submit the image classifier of the image's working directory as soon as the head is well, and follow its log.

    The job outlives a dropped connection, and the same command with the name of its run follows it again. It waits for
    a worker on each of the stack's GPUs, as instances that still pull the image are not in the cluster yet.
    """
    workers = f" --num-workers {gpus}" if gpus else ""
    wait = f'while c=$({HEAD_CONTAINER}); [ -z "$c" ]; do echo waiting for the Ray head to start; sleep 10; done'
    return f"{wait}; sudo docker exec -it $c ray-on-ecs run{workers} image_classifier.py"


def interactive(description: str, command: str) -> Document:
    """Document of a session that runs one command with a terminal, and takes no other."""
    return {
        "schemaVersion": "1.0",
        "description": description,
        "sessionType": "InteractiveCommands",
        "properties": {"linux": {"commands": command, "runAsElevated": False}},
    }


def forwarding() -> Document:
    """Document of a session that forwards the port of Ray's dashboard or of Jupyter, on the head or on a node."""
    ports = "|".join(str(port) for port in (DASHBOARD_PORT, NOTEBOOK_PORT))
    return {
        "schemaVersion": "1.0",
        "description": "Port of Ray's dashboard or of Jupyter",
        "sessionType": "Port",
        "parameters": {
            "host": _parameter("Name of the head, or address of a node", HOST),
            "portNumber": _parameter("Port there", f"^({ports})$"),
            "localPortNumber": _parameter("Port here; 0 is a free one", LOCAL_PORT),
        },
        "properties": {
            "type": "LocalPortForwarding",
            "host": "{{ host }}",
            "portNumber": "{{ portNumber }}",
            "localPortNumber": "{{ localPortNumber }}",
        },
    }


def session(region: str, instance_id: str, document: str) -> str:
    """Start a session of a document without parameters."""
    return f"aws ssm start-session --region {region} --target {instance_id} --document-name {document}"


def dashboard(region: str, instance_id: str, head_host: str, document: str) -> str:
    """Forward Ray's dashboard to the same port here, through the instance to the address of the head's task."""
    port = str(DASHBOARD_PORT)
    parameters = {"host": [head_host], "portNumber": [port], "localPortNumber": [port]}
    quoted = f"'{json.dumps(parameters, separators=(',', ':'))}'"
    return f"{session(region, instance_id, document)} --parameters {quoted}"


def token(region: str, parameter_name: str) -> str:
    """Print Ray's token, which the dashboard asks for."""
    return (
        f"aws ssm get-parameter --region {region} --name {parameter_name} --with-decryption"
        " --query Parameter.Value --output text"
    )


def _parameter(description: str, pattern: str) -> dict[str, str]:
    return {"type": "String", "description": description, "allowedPattern": pattern}
