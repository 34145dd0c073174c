"""Pre-flight check of the Docker daemon: without it, `pulumi up` would fail with half of the stack created."""

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
    "start it (check with `docker info`), select another daemon with DOCKER_HOST or `docker context use`, or set "
    "imageUri to an existing image"
)


def check(*, is_up: Callable[[], bool]) -> None:
    """Ask the Docker daemon for its version, through Docker's current context or DOCKER_HOST.

    Args:
        is_up: True if the stack is up: its image exists, and is built again only when it changes. Called only if Docker
            does not answer.

    Raises:
        RunError: Docker does not answer, and the image has to be built.
    """
    problem = _problem()
    if problem is None:
        return
    if not is_up():
        raise pulumi.RunError(f"imageUri: is empty, so the image is built locally, but {problem}; {HINT}")
    pulumi.log.warn(f"{problem}; this machine could not build a changed image")


def _problem() -> str | None:
    docker = shutil.which("docker")
    if docker is None:  # the build needs only the daemon, not the command
        has_daemon = os.environ.get("DOCKER_HOST") or SOCKET.exists()
        return None if has_daemon else "Docker is not installed"
    try:
        command = [docker, "version", "--format", "{{.Server.Version}}"]
        version = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"Docker does not answer within {SECONDS} s"
    if version.returncode == 0:
        return _missing_store()
    lines = version.stderr.strip().splitlines() or ["without a reason"]
    return f"Docker does not answer ({lines[-1]})"


def _missing_store() -> str | None:
    """Problem with Docker's credential store, which the build calls for every registry."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    name = config.get("credsStore") if isinstance(config, dict) else None
    if not name or shutil.which(f"docker-credential-{name}"):
        return None
    return f"{folder / 'config.json'} names docker-credential-{name}, which is not in PATH"
