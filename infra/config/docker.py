"""Whether the image can be built here. A preview asks, as `pulumi up` would find out with half of the stack made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pulumi

SECONDS = 20
SOCKET = Path("/var/run/docker.sock")
HINT = (
    "start it (`docker info` tells whether it runs), choose another one by DOCKER_HOST or `docker context use`, or "
    "give imageUri, a ready image"
)


def check(*, is_up: Callable[[], bool]) -> None:
    """Ask Docker for its version, by its own context or DOCKER_HOST.

    Args:
        is_up: Function that tells whether the stack is, with an image: then nothing has to be built unless the image
            changes. It is called only if Docker does not answer.

    Raises:
        RunError: It does not answer, and the image has to be built.
    """
    if problem := _problem():
        if not is_up():
            raise pulumi.RunError(f"imageUri: is empty, so the image is to be built here, and {problem}; {HINT}")
        pulumi.log.warn(f"{problem}; a change of the image could not be built here")


def _problem() -> str | None:
    docker = shutil.which("docker")
    if docker is None:  # the build needs a daemon and no command
        found = os.environ.get("DOCKER_HOST") or SOCKET.exists()
        return None if found else "there is no Docker"
    try:
        command = [docker, "version", "--format", "{{.Server.Version}}"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"Docker does not answer within {SECONDS} s"
    if asked.returncode == 0:
        return _missing_store()
    said = asked.stderr.strip().splitlines() or ["no reason given"]
    return f"Docker does not answer ({said[-1]})"


def _missing_store() -> str | None:
    """Find Docker's credential store if it is not installed: the build asks it for every registry."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    name = config.get("credsStore") if isinstance(config, dict) else None
    if not name or shutil.which(f"docker-credential-{name}"):
        return None
    return f"{folder / 'config.json'} names docker-credential-{name}, which is not in PATH"
