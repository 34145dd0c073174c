"""Where a stack's cluster is: the stack's outputs, from Pulumi or from a file that a user with Pulumi has made."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import ResourceError, UsageError, one_line

PROJECT_FILE = "Pulumi.yaml"
# Pulumi asks a backend that may be far away.
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


# What Pulumi says, and what mends it.
PULUMI_HINTS = {
    "PULUMI_CONFIG_PASSPHRASE": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "incorrect passphrase": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "PULUMI_ACCESS_TOKEN": "pulumi login",
}


class PulumiError(UsageError):
    """Pulumi does not tell the stack's outputs.

    Attributes:
        fix: The command that mends it.
    """

    def __init__(self, line: str, fix: str) -> None:
        super().__init__(line)
        self.fix = fix


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The cluster of a stack that is up: the output `connection` of the program that makes it.

    Attributes:
        name: What the stack is called: its name, or that of the file with its outputs.
        region: The AWS region.
        bucket: The bucket that keeps the runs.
        cluster_name: The ECS cluster.
        head_instance_id: The EC2 instance of the head, when the outputs were written.
        head_host: The name of the head's task in the VPC.
        token_parameter: The SSM parameter with Ray's token.
        cluster_info_parameter: The SSM parameter that describes the workers.
        shell_document: The Session document that opens a shell in the head's container.
        forward_document: The Session document that forwards a port.
        services: The ECS service of each kind of node: `head`, `workers` and, if there can be any, `cpu-workers`.
        default_gpus: Number of GPUs that a job requests by default.
        log_group: The CloudWatch log group.
        metrics_dashboard: The CloudWatch dashboard.
        estimated_hourly_usd: What all instances cost an hour, or None if AWS did not say.
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
        """Where its runs are."""
        return f"s3://{self.bucket}/runs"


def find(name: str | None, outputs: str | None, seconds: float = PULUMI_SECONDS) -> Stack:
    """Return the stack.

    Args:
        name: The stack's name, or None for the one that Pulumi has selected.
        outputs: A file with the JSON of `pulumi stack output --json`, or None to ask Pulumi.
        seconds: How long Pulumi may take.

    Raises:
        UsageError: There is no project, no stack, or no such file; or it is not a stack of this project.
        ResourceError: Pulumi can't be asked, or the stack is not up.
    """
    if outputs is not None:
        return _read(Path(outputs).stem, _load(outputs), f"--outputs: {outputs}")
    folder = _project_folder()
    called = name or "the selected stack"
    return _read(name or "(selected)", _ask_pulumi(folder, name, seconds), f"{called} of {folder}")


def _project_folder() -> Path:
    """Return the folder of the nearest Pulumi project: the one that is here, or the one of this very code."""
    here, code = Path.cwd(), Path(__file__).resolve().parents[2]
    for folder in (here, *here.parents, code):
        if (folder / PROJECT_FILE).is_file():
            return folder
    raise UsageError(f"there is no {PROJECT_FILE} here or above; go to the project's folder, or give --outputs FILE")


def _ask_pulumi(folder: Path, name: str | None, seconds: float) -> dict[str, Any]:
    command = ["pulumi", "stack", "output", "--json", "--non-interactive", *(["--stack", name] if name else [])]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: pulumi; {INSTALL_PULUMI}") from cause
    except subprocess.TimeoutExpired as cause:
        raise ResourceError(f"pulumi stack output did not end in {seconds:.0f} s; try it by itself") from cause
    if done.returncode:
        said = one_line(done.stderr or done.stdout).removeprefix("error: ")
        for part, hint in PULUMI_HINTS.items():
            if part in said:
                raise PulumiError(f"pulumi stack output fails in {folder} ({said}); {hint}", hint)
        hint = "pulumi stack ls lists the stacks, pulumi stack select chooses one, --stack NAME names one"
        raise PulumiError(f"pulumi names no stack in {folder} ({said}); {hint}", "pulumi stack ls")
    try:
        return json.loads(done.stdout or "{}")
    except ValueError as cause:
        raise ResourceError(f"pulumi stack output printed no JSON ({one_line(done.stdout)})") from cause


def _load(file: str) -> dict[str, Any]:
    try:
        outputs = json.loads(Path(file).expanduser().read_text())
    except (OSError, ValueError) as cause:
        reason = "it is no JSON" if isinstance(cause, ValueError) else cause
        raise UsageError(
            f"--outputs: {file} can't be read ({reason}); make it by pulumi stack output --json"
        ) from cause
    if not isinstance(outputs, dict):
        raise UsageError(f"--outputs: {file} has no outputs of a stack; make it by pulumi stack output --json")
    return outputs


def _read(name: str, outputs: dict[str, Any], called: str) -> Stack:
    if not outputs:
        raise ResourceError(f"{called} has no outputs: the stack is not up; pulumi up creates it")
    known = {each.name for each in fields(Stack)} - {"name"}
    # A file may hold the connection alone, as of one of several clusters of a program.
    connection = outputs if known <= outputs.keys() else outputs.get(CONNECTION)
    if not isinstance(connection, dict):
        raise UsageError(f"{called}: has no output {CONNECTION}; {UPDATE}")
    if missing := sorted(known - connection.keys()):
        raise UsageError(f"{called}: its output {CONNECTION} has no {', '.join(missing)}; {UPDATE}")
    return Stack(name=name, **{key: connection[key] for key in known})
