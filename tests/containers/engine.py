"""A container engine, Docker or a compatible one, and a container definition as its arguments."""

import json
import os
import resource
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.definitions.containers import Container

SECONDS = 120


@dataclass(frozen=True)
class Engine:
    """The engine's command, with the variables whose values `--env NAME` passes on."""

    command: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def run(self, *arguments: str, check: bool = True, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Call the engine; AssertionError with its output if it fails and `check` is true."""
        done = subprocess.run(
            [self.command, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **self.secrets},
        )
        assert done.returncode == 0 or not check, f"{arguments[:3]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str, output: Path) -> subprocess.Popen[str]:
        """Call the engine in the background, with its output in a file."""
        command, environment = [self.command, *arguments], {**os.environ, **self.secrets}
        with output.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment)

    def execute(self, name: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return self.run("exec", name, *command, check=check)

    def python(self, name: str, program: str, *arguments: str) -> str:
        """Run a Python program in a container and return its output."""
        return self.execute(name, "python", "-c", program, *arguments).stdout.strip()

    def inspect(self, name: str) -> dict[str, Any]:
        """Return the engine's description of a container."""
        return json.loads(self.run("inspect", name).stdout)[0]

    def running(self) -> set[str]:
        """Return the names of the running containers."""
        return set(self.run("ps", "--filter=status=running", "--format={{.Names}}").stdout.split())

    def wait(self, name: str) -> tuple[int, str]:
        """Wait for a container to end and return its exit status and its log."""
        return int(self.run("wait", name).stdout), self.logs(name)

    def logs(self, name: str) -> str:
        """Return the output of a container."""
        done = self.run("logs", name)
        return done.stdout + done.stderr

    def remove(self, *names: str) -> None:
        """Kill and remove containers and their volumes, if they exist."""
        for name in names:
            self.run("kill", name, check=False)  # `rm --force` of some engines would wait for the stop timeout
            self.run("rm", "--force", "--volumes", name, check=False)

    def remove_volume(self, name: str) -> None:
        """Remove a volume that outlived its container, if it exists."""
        self.run("volume", "rm", "--force", name, check=False)

    @contextmanager
    def network(self, name: str) -> Generator[str]:
        """Create a network that other networks cannot reach, as with a security group; remove it afterwards."""
        # Docker isolates its networks by default; other engines need an option that Docker does not know.
        if self.run("network", "create", "--opt=isolate=true", name, check=False).returncode:
            self.run("network", "create", name)
        try:
            yield name
        finally:
            self.run("network", "rm", "--force", name, check=False)

    def address(self, name: str, network: str) -> str:
        """Return a container's address in a network."""
        return self.inspect(name)["NetworkSettings"]["Networks"][network]["IPAddress"]


# All keys of this stack's definitions: a new key must be translated below, or listed here with a reason.
TRANSLATED = {
    "command", "dockerSecurityOptions", "environment", "image", "linuxParameters", "memory", "mountPoints",
    "readonlyRootFilesystem", "secrets", "stopTimeout", "ulimits", "user",
}  # fmt: skip
LEFT_OUT = {
    "name": "each test chooses its own",
    "essential": "there is one container",
    "healthCheck": "the tests run its command themselves: not every engine can schedule it",
    "logConfiguration": "the engine keeps the logs",
    "resourceRequirements": "there are no GPUs here",
}
LINUX = {"initProcessEnabled", "sharedMemorySize", "capabilities"}


def arguments(container: Container, extra: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """Translate a container definition into arguments of `docker run`, as ECS does; image and command come last.

    Args:
        container: One of infra/containers.py.
        extra: More environment variables.
        kept: The engine's name, or this machine's folder, of each volume that outlives its task; the other volumes end
            with the container.
    """
    linux = container["linuxParameters"]
    assert set(container) <= TRANSLATED | set(LEFT_OUT), set(container)
    assert set(linux) == LINUX
    assert set(linux["capabilities"]) == {"drop"}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # an engine without a daemon can't raise its limit
    limits = {
        limit["name"]: (min(limit["softLimit"], most), min(limit["hardLimit"], most)) for limit in container["ulimits"]
    }
    environment = {each["name"]: each["value"] for each in container["environment"]} | dict(extra)
    return [
        *(["--init"] if linux["initProcessEnabled"] else []),
        *(["--read-only"] if container["readonlyRootFilesystem"] else []),
        *(f"--cap-drop={capability}" for capability in linux["capabilities"]["drop"]),
        *(f"--security-opt={option}" for option in container["dockerSecurityOptions"]),
        f"--user={container['user']}",
        f"--memory={container['memory']}m",
        f"--shm-size={linux['sharedMemorySize']}m",
        f"--stop-timeout={container['stopTimeout']}",
        *(f"--ulimit={name}={soft}:{hard}" for name, (soft, hard) in limits.items()),
        *(f"--volume={_volume(mount, kept)}" for mount in container["mountPoints"]),
        *(f"--env={name}={value}" for name, value in environment.items()),
        # Only the name: the value comes from the engine's environment and must not appear in a command line.
        *(f"--env={secret['name']}" for secret in container["secrets"]),
        container["image"],
        *container["command"],
    ]


def _volume(mount: Mapping[str, Any], kept: Mapping[str, str]) -> str:
    name, path = mount["sourceVolume"], mount["containerPath"]
    access = ":ro" if mount.get("readOnly") else ""
    return f"{kept[name]}:{path}{access}" if name in kept else path
