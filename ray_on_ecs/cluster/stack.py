"""Outputs of a stack, from Pulumi or from a file of `pulumi stack output --json`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import ResourceError, UsageError, one_line

PROJECT_FILE = "Pulumi.yaml"
# Long, as Pulumi reads the state from a remote backend.
PULUMI_SECONDS = 120.0
INSTALL_PULUMI = (
    "install Pulumi, or give the stack's outputs as --outputs FILE (pulumi stack output --json > FILE), or --local "
    "for a Ray cluster on this machine"
)
# The output of a program that makes a RayCluster.
CONNECTION = "connection"
UPDATE = (
    "export a RayCluster's connection under this name; in a stack of this project pulumi up does so (and replaces the "
    "head: not during a run); --stack names another stack"
)


# Parts of Pulumi's error messages, and the command that fixes each.
PULUMI_HINTS = {
    "PULUMI_CONFIG_PASSPHRASE": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "incorrect passphrase": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "PULUMI_ACCESS_TOKEN": "pulumi login",
}


class PulumiError(UsageError):
    """Pulumi does not print the stack's outputs.

    Attributes:
        fix: The command that fixes it.
    """

    def __init__(self, line: str, fix: str) -> None:
        super().__init__(line)
        self.fix = fix


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Output `connection` of a stack that is up.

    Attributes:
        name: The name of the stack, or of the file with its outputs.
        region: The AWS region.
        bucket: The bucket that keeps the runs.
        cluster_name: The ECS cluster.
        head_instance_id: The EC2 instance of the head at the time of `pulumi up`.
        head_host: The DNS name of the head in the VPC.
        token_parameter: The SSM parameter with Ray's token.
        cluster_info_parameter: The SSM parameter that describes the workers.
        shell_document: The Session document that opens a shell in the head's container.
        forward_document: The Session document that forwards a port.
        services: The ECS service of each kind of node: `head`, `workers` and, if there can be any, `cpu-workers`.
        default_gpus: Number of GPUs that a job requests by default.
        log_group: The CloudWatch log group.
        metrics_dashboard: The CloudWatch dashboard.
        estimated_hourly_usd: The hourly price of all instances, or None if it is not known.
    """

    name: str
    region: str
    bucket: str
    cluster_name: str
    head_instance_id: str
    head_host: str
    token_parameter: str
    cluster_info_parameter: str
    shell_document: str
    forward_document: str
    services: dict[str, str]
    default_gpus: int
    log_group: str
    metrics_dashboard: str
    estimated_hourly_usd: float | None

    @property
    def storage_path(self) -> str:
        """The prefix of the runs."""
        return f"s3://{self.bucket}/runs"


def find(name: str | None, outputs: str | None, seconds: float = PULUMI_SECONDS) -> Stack:
    """Return the stack.

    Args:
        name: The stack's name, or None for the one that Pulumi has selected.
        outputs: A file with the JSON of `pulumi stack output --json`, or None to run Pulumi.
        seconds: The timeout of Pulumi.

    Raises:
        UsageError: The project, the stack or the file is missing, or the outputs are another program's.
        ResourceError: Pulumi fails, or the stack is not up.
    """
    if outputs is not None:
        return _read(Path(outputs).stem, _load(outputs), f"--outputs: {outputs}")
    folder = _project_folder()
    shown_name = name or "the selected stack"
    return _read(name or "(selected)", _pulumi_outputs(folder, name, seconds), f"{shown_name} of {folder}")


def _project_folder() -> Path:
    """Return the nearest Pulumi project: the working directory or a parent, else the checkout of this code."""
    cwd = Path.cwd()
    checkout = Path(__file__).resolve().parents[2]
    for folder in (cwd, *cwd.parents, checkout):
        if (folder / PROJECT_FILE).is_file():
            return folder
    raise UsageError(
        f"{PROJECT_FILE} not found here or in a parent folder; change to the project's folder, or give --outputs FILE"
    )


def _pulumi_outputs(folder: Path, name: str | None, seconds: float) -> dict[str, Any]:
    command = ["pulumi", "stack", "output", "--json", "--non-interactive"]
    if name:
        command += ["--stack", name]
    try:
        process = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: pulumi; {INSTALL_PULUMI}") from cause
    except subprocess.TimeoutExpired as cause:
        raise ResourceError(
            f"pulumi stack output took more than {seconds:.0f} s; run it in {folder} to see the reason"
        ) from cause
    if process.returncode:
        message = one_line(process.stderr or process.stdout).removeprefix("error: ")
        for part, hint in PULUMI_HINTS.items():
            if part in message:
                raise PulumiError(f"pulumi stack output fails in {folder} ({message}); {hint}", hint)
        hint = "pulumi stack ls lists the stacks, pulumi stack select chooses one, --stack NAME names one"
        raise PulumiError(f"pulumi stack output fails in {folder} ({message}); {hint}", "pulumi stack ls")
    try:
        return json.loads(process.stdout or "{}")
    except ValueError as cause:
        raise ResourceError(f"the output of pulumi stack output is not JSON ({one_line(process.stdout)})") from cause


def _load(file: str) -> dict[str, Any]:
    try:
        outputs = json.loads(Path(file).expanduser().read_text())
    except (OSError, ValueError) as cause:
        reason = "it is not JSON" if isinstance(cause, ValueError) else cause
        raise UsageError(
            f"--outputs: {file} can't be read ({reason}); write it with pulumi stack output --json"
        ) from cause
    if not isinstance(outputs, dict):
        raise UsageError(f"--outputs: {file} has no outputs of a stack; write it with pulumi stack output --json")
    return outputs


def _read(name: str, outputs: dict[str, Any], source: str) -> Stack:
    if not outputs:
        raise ResourceError(f"{source} has no outputs: the stack is not up; pulumi up creates it")
    keys = {field.name for field in fields(Stack)} - {"name"}
    # A file may hold only the connection, for example of one of a program's clusters.
    connection = outputs if keys <= outputs.keys() else outputs.get(CONNECTION)
    if not isinstance(connection, dict):
        raise UsageError(f"{source}: has no output {CONNECTION}; {UPDATE}")
    missing = sorted(keys - connection.keys())
    if missing:
        raise UsageError(f"{source}: its output {CONNECTION} has no {', '.join(missing)}; {UPDATE}")
    return Stack(name=name, **{key: connection[key] for key in keys})
