"""Outputs of a stack, from Pulumi or from a file of `pulumi stack output --json`."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import ResourceError, UsageError, one_line

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT_FILES = ("Pulumi.yaml", "Pulumi.yml", "Pulumi.json")
# Long, as Pulumi reads the state from a remote backend.
PULUMI_SECONDS = 120.0
PULUMI = "https://www.pulumi.com/docs/install/"
OR_LOCAL = ", or --local for this machine"
INSTALL_PULUMI = (
    "install Pulumi, set RAY_ON_ECS_CLUSTER=s3://BUCKET, or give --outputs FILE with the stack's outputs "
    f"(pulumi stack output --json > FILE){OR_LOCAL}"
)
# The output of a program that makes a RayCluster.
CONNECTION = "connection"
OTHER_PROJECT = "for the cluster of another project change to its folder, or give --outputs FILE"
UPDATE = (
    f"{OTHER_PROJECT}; a program with a RayCluster exports the connection, and in a stack of this project pulumi up "
    "does so (and replaces the head: not during a run); --stack names another stack"
)
# Environment variables that choose the credentials.
CREDENTIALS = {"AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"}
# Parts of Pulumi's error messages, and the command that fixes each.
PULUMI_HINTS = {
    "PULUMI_CONFIG_PASSPHRASE": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "incorrect passphrase": "export PULUMI_CONFIG_PASSPHRASE=…, the passphrase of pulumi stack init",
    "PULUMI_ACCESS_TOKEN": "pulumi login",
}


class PulumiError(UsageError):
    """Pulumi does not print the stack's outputs; `fix` is the command that makes it."""

    def __init__(self, line: str, fix: str) -> None:
        super().__init__(line)
        self.fix = fix


class AnotherProgram(UsageError):
    """The stack is not one of a cluster."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Output `connection` of a stack that is up."""

    name: str  # of the stack, or of the file with its outputs
    region: str
    bucket: str
    cluster_name: str
    head_instance_id: str  # at the time of `pulumi up`; empty for a head that sleeps
    head_host: str  # DNS name in the VPC
    token_parameter: str
    cluster_info_parameter: str
    shell_document: str
    forward_document: str
    services: dict[str, str]  # of the head and by kind of node: `workers`, and others if there can be any
    log_group: str
    estimated_hourly_usd: float | None  # of all instances
    # What runs without workers, by part (head, NAT gateway); a part is None if its price is unknown, and all are None
    # without the head's price, and in outputs of earlier versions.
    idle_hourly_usd: dict[str, float | None] | None = None
    # The same while the head sleeps; None if it does not sleep, and in outputs of earlier versions.
    asleep_hourly_usd: dict[str, float | None] | None = None
    project: Path | None = None  # None for a file

    @property
    def storage_path(self) -> str:
        """The prefix of the runs."""
        return f"s3://{self.bucket}/runs"


def find(name: str | None, outputs: str | None, seconds: float = PULUMI_SECONDS) -> Stack:
    """Return the stack. If it is of a Pulumi project, set AWS_PROFILE to the project's `aws:profile` (`_use_profile`).

    The project is the nearest whose stack has a cluster: in the working directory, a parent, or the checkout of this
    code. An app's project may be nearer. Without a name it is the stack that Pulumi has selected. UsageError if it is
    missing, or the outputs are another program's; ResourceError if Pulumi fails, or the stack is not up.
    """
    if outputs is not None:
        try:
            content = json.loads(Path(outputs).expanduser().read_text())
        except (OSError, ValueError) as cause:
            reason = "it is not JSON" if isinstance(cause, ValueError) else cause
            write = "write it with pulumi stack output --json"
            raise UsageError(f"--outputs: {outputs} can't be read ({reason}); {write}") from cause
        return _read(Path(outputs).stem, content, f"--outputs: {outputs}")
    errors = []
    cwd = Path.cwd()
    for folder in dict.fromkeys((cwd, *cwd.parents, CHECKOUT)):
        if not any((folder / file).is_file() for file in PROJECT_FILES):
            continue
        try:
            source = f"{name or 'the selected stack'} of {folder}"
            found = _read(name or "(selected)", _pulumi_outputs(folder, name, seconds), source, folder)
        except AnotherProgram as cause:
            errors.append(cause)
            continue
        _use_profile(folder, name, seconds)
        return found
    if errors:
        raise errors[0]
    raise UsageError(f"{PROJECT_FILES[0]} not found here or in a parent folder; {OTHER_PROJECT}")


def _use_profile(folder: Path, name: str | None, seconds: float) -> None:
    """Set AWS_PROFILE to the stack's `aws:profile`, unless the environment chooses, or this machine lacks it."""
    if os.environ.keys() & CREDENTIALS:
        return
    # Running Pulumi again takes a second.
    texts = []
    for file in folder.glob("Pulumi.*.y*ml"):
        with suppress(OSError):  # Pulumi says what it can't read
            texts.append(file.read_bytes())
    if not any(b"aws:profile" in text for text in texts):
        return
    process = _pulumi(folder, ["config", "get", "aws:profile"], name, seconds)
    profile = process.stdout.strip()
    if process.returncode == 0 and profile:
        from botocore.session import Session

        if profile in Session().available_profiles:
            os.environ["AWS_PROFILE"] = profile


def _pulumi(folder: Path, words: list[str], name: str | None, seconds: float) -> subprocess.CompletedProcess[str]:
    command = ["pulumi", *words, "--non-interactive", *(["--stack", name] if name else [])]
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as cause:
        raise PulumiError(f"command not found: pulumi; {INSTALL_PULUMI}", PULUMI) from cause
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise ResourceError(f"pulumi {' '.join(words)} fails in {folder} ({one_line(cause)})") from cause


def _pulumi_outputs(folder: Path, name: str | None, seconds: float) -> Any:
    process = _pulumi(folder, ["stack", "output", "--json"], name, seconds)
    if process.returncode:
        message = one_line(process.stderr or process.stdout).removeprefix("error: ")
        failure = f"pulumi stack output fails in {folder} ({message})"
        if name and "no stack named" in message:
            raise AnotherProgram(f"{failure}; pulumi stack ls lists the stacks, and {OTHER_PROJECT}")
        for part, hint in PULUMI_HINTS.items():
            if part in message:
                raise PulumiError(f"{failure}; {hint}", hint)
        hint = "pulumi stack ls lists the stacks, pulumi stack select chooses one, --stack NAME names one"
        raise PulumiError(f"{failure}; {hint}; {OTHER_PROJECT}", "pulumi stack ls")
    try:
        return json.loads(process.stdout or "{}")
    except ValueError as cause:
        raise ResourceError(f"the output of pulumi stack output is not JSON ({one_line(process.stdout)})") from cause


def _read(name: str, outputs: Any, source: str, project: Path | None = None) -> Stack:
    if not isinstance(outputs, dict):
        raise UsageError(f"{source} has no outputs of a stack; write it with pulumi stack output --json")
    if not outputs:
        hint = f"; {OTHER_PROJECT}" if project else ""
        raise ResourceError(f"{source} has no outputs: the stack is not up; pulumi up creates it{hint}")
    own = [field for field in fields(Stack) if field.name not in ("name", "project")]
    keys = {field.name for field in own if field.default is MISSING}
    # A file may hold only the connection, for example of one of a program's clusters.
    connection = outputs if keys <= outputs.keys() else outputs.get(CONNECTION)
    if not isinstance(connection, dict):
        raise AnotherProgram(f"{source}: has no output {CONNECTION}; {UPDATE}")
    missing = sorted(keys - connection.keys())
    if missing:
        error = AnotherProgram if "cluster_name" in missing else UsageError
        raise error(f"{source}: its output {CONNECTION} has no {', '.join(missing)}; {UPDATE}")
    values = {field.name: connection[field.name] for field in own if field.name in connection}
    return Stack(name=name, project=project, **values)
