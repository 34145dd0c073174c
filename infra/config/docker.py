"""Pre-flight check of what builds the image: without it, `pulumi up` would fail with half of the stack created.

Pulumi's docker-build provider contains buildx, and runs BuildKit in a container if no other builder is selected. So it
needs a Docker daemon, but neither the command `docker` nor its buildx.
https://github.com/pulumi/pulumi-docker-build/blob/main/provider/internal/host.go
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pulumi

from infra.errors import SettingError, warn

SECONDS = 20
SOCKET = Path("/var/run/docker.sock")
TARGET = "linux/amd64"
# Layers of the image, and the same again in BuildKit's cache.
ROOM_GIB = 25
HINT = (
    "start Docker (check with `docker info`), select another daemon or builder (DOCKER_HOST, `docker context use`, "
    "`docker buildx use`), set image_build to codebuild, or image_uri to an existing image"
)


def choose(image_build: str) -> tuple[str, SettingError | None]:
    """Builder of an image, `local` or `codebuild`, and the reason why this machine can't build it."""
    if image_build == "codebuild":
        return "codebuild", None
    problem = check()
    if not problem or image_build == "local":
        return "local", problem
    pulumi.log.info(f"the image is built in CodeBuild, as Docker can't: {problem}; image_build chooses one of them")
    return "codebuild", None


def check() -> SettingError | None:
    """Return the reason why this machine can't build the image; warn if it can, but perhaps slowly or not for long."""
    problem = _problem()
    if problem:
        return SettingError("image_build", "local", f"needs Docker on this machine, but {problem}", HINT)
    for doubt in _doubts():
        warn(f"the image is built locally, and {doubt}")
    return None


def _problem() -> str | None:
    """Reason why this machine can't build, or None."""
    if os.environ.get("DOCKER_BUILDKIT", "1").lower() not in ("", "1", "t", "true"):
        return "DOCKER_BUILDKIT in the environment turns BuildKit off (unset it)"
    if shutil.which("docker") is None:
        has_daemon = os.environ.get("DOCKER_HOST") or SOCKET.exists()
        return _missing_store() if has_daemon else "Docker is not installed"
    version = _docker("version", "--format", "{{.Server.Os}}{{range .Server.Components}}\n{{.Name}}{{end}}")
    if version is None:
        return f"Docker does not answer within {SECONDS} s"
    if version.returncode:
        return f"Docker does not answer ({(version.stderr.strip().splitlines() or ['without a reason'])[-1]})"
    system, *components = version.stdout.splitlines() or [""]
    if "Engine" not in components:  # https://github.com/containers/podman/issues/17836
        return f"`docker` leads to {(components or ['another program'])[0]} (e.g. Podman), not to Docker's engine"
    if system == "windows":
        return "Docker runs Windows containers (switch it to Linux containers)"
    if (errors := _of_builder("Error")) and not _of_builder("Platforms"):
        return f"the selected builder does not answer ({errors[0]})"
    return _missing_store()


def _missing_store() -> str | None:
    """Problem with Docker's credential store; a missing helper of one registry (credHelpers) is skipped by Docker."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        name = json.loads(path.read_text())["credsStore"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not name or shutil.which(f"docker-credential-{name}"):
        return None
    return f"{path} names docker-credential-{name}, which is not in PATH"


def _doubts() -> Iterator[str]:
    """Facts that may make the build slow, or fail."""
    platforms = ", ".join(_of_builder("Platforms"))
    if platforms and TARGET not in platforms:  # https://github.com/docker/docs/pull/24750
        yield (
            f"the builder has no {TARGET} ({platforms}): emulated, it is slow and may fail; see `docker buildx use`, "
            "or set image_build to codebuild"
        )
    info = _docker("info", "--format", "{{.Name}} {{.DockerRootDir}}")
    name, _, root = (info.stdout if info else "").strip().partition(" ")
    # The disk of another machine, or of Docker Desktop's virtual machine, is unknown.
    if name == platform.node() and os.path.isdir(root):
        free = shutil.disk_usage(root).free // 2**30
        if free < ROOM_GIB:
            yield f"{root} has {free} GiB left, of some {ROOM_GIB} that image and cache take"


def _of_builder(fact: str) -> list[str]:
    """A fact of each node of the builder that `docker buildx use` selected; none without the command buildx."""
    builder = _docker("buildx", "inspect")
    text = builder.stdout if builder else f"Error: no answer within {SECONDS} s"
    return re.findall(rf"^{fact}:\s*(.+)", text, re.MULTILINE)


def _docker(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Result of a Docker command, None without the command or an answer in time."""
    try:
        return subprocess.run(["docker", *arguments], capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
