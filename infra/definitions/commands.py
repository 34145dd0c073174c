"""The commands that the stack exports, each one shell line ready to paste.

All of them go through AWS Systems Manager: nothing of the stack listens to the internet.
"""

from __future__ import annotations

import json

from ray_on_ecs.contract import DASHBOARD_PORT, HEAD_CONTAINER, HEAD_SHELL, SHELL_DOCUMENT


def train(region: str, gpus: int, instance_id: str) -> str:
    """Submit the image classifier of the image's working directory as soon as the head is well, and follow its log.

    The job outlives a dropped connection, and the same command with the name of its run follows it again. It waits for
    a worker on each of the stack's GPUs, as instances that still pull the image are not in the cluster yet.
    """
    workers = f" --num-workers {gpus}" if gpus else ""
    wait = f'while c=$({HEAD_CONTAINER}); [ -z "$c" ]; do echo waiting for the Ray head to start; sleep 10; done'
    submit = f"sudo docker exec -it $c ray-on-ecs run{workers} image_classifier.py"
    return _session(region, instance_id, SHELL_DOCUMENT, {"command": [f"{wait}; {submit}"]})


def shell(region: str, instance_id: str) -> str:
    """Open a shell in the head's container, for `ray status` or `ray job list`."""
    return _session(region, instance_id, SHELL_DOCUMENT, {"command": [HEAD_SHELL]})


def dashboard(region: str, instance_id: str, head_host: str) -> str:
    """Forward Ray's dashboard to the same port here, through the instance to the address of the head's task."""
    port = str(DASHBOARD_PORT)
    parameters = {"host": [head_host], "portNumber": [port], "localPortNumber": [port]}
    return _session(region, instance_id, "AWS-StartPortForwardingSessionToRemoteHost", parameters)


def token(region: str, parameter_name: str) -> str:
    """Print Ray's token, which the dashboard asks for."""
    return (
        f"aws ssm get-parameter --region {region} --name {parameter_name} --with-decryption"
        " --query Parameter.Value --output text"
    )


def _session(region: str, instance_id: str, document: str, parameters: dict[str, list[str]]) -> str:
    # In single quotes, as the shell here must leave `$(...)` alone.
    quoted = f"'{json.dumps(parameters, separators=(',', ':'))}'"
    target = f"--region {region} --target {instance_id}"
    return f"aws ssm start-session {target} --document-name {document} --parameters {quoted}"
