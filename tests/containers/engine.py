"""A container engine, Docker or what stands for it, and what ECS would tell it about a container definition."""

import json
import os
import resource
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.containers import Container

SECONDS = 120


@dataclass(frozen=True)
class Engine:
    """The command that is called, with the variables that `--env NAME` takes its values from."""

    command: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def run(self, *arguments: str, check: bool = True, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Call the engine; AssertionError with its output where it fails and `check` is on."""
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
        """Call the engine and go on meanwhile; what it prints goes to a file."""
        command, environment = [self.command, *arguments], {**os.environ, **self.secrets}
        with output.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment)

    def execute(self, name: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return self.run("exec", name, *command, check=check)

    def python(self, name: str, program: str, *arguments: str) -> str:
        """What a Python program prints in a container."""
        return self.execute(name, "python", "-c", program, *arguments).stdout.strip()

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        return json.loads(self.run("inspect", name).stdout)[0]

    def running(self) -> set[str]:
        """The names of the containers that run."""
        return set(self.run("ps", "--filter=status=running", "--format={{.Names}}").stdout.split())

    def wait(self, name: str) -> tuple[int, str]:
        """The exit status and the log of a container that ends in time."""
        return int(self.run("wait", name).stdout), self.logs(name)

    def logs(self, name: str) -> str:
        """Everything that a container has written."""
        done = self.run("logs", name)
        return done.stdout + done.stderr

    def remove(self, *names: str) -> None:
        """Kill and forget containers with their volumes; absent ones are none of its business."""
        for name in names:
            self.run("kill", name, check=False)  # `rm --force` of some engines would wait for the stop timeout
            self.run("rm", "--force", "--volumes", name, check=False)

    def remove_volume(self, name: str) -> None:
        """Forget a volume that outlived its container, if it is there."""
        self.run("volume", "rm", "--force", name, check=False)

    @contextmanager
    def network(self, name: str) -> Generator[str]:
        """A network that others don't reach, as a security group would have it; gone afterwards."""
        # Docker's networks are apart from each other as they are; other engines must be told, in words it doesn't know.
        if self.run("network", "create", "--opt=isolate=true", name, check=False).returncode:
            self.run("network", "create", name)
        try:
            yield name
        finally:
            self.run("network", "rm", "--force", name, check=False)

    def address(self, name: str, network: str) -> str:
        """A container's address on a network."""
        return self.inspect(name)["NetworkSettings"]["Networks"][network]["IPAddress"]


# All that a definition of this stack holds: a new key must be translated here, or stand here with its reason.
TRANSLATED = {
    "command", "environment", "image", "linuxParameters", "memory", "mountPoints", "readonlyRootFilesystem", "secrets",
    "stopTimeout", "ulimits", "user",
}  # fmt: skip
LEFT_OUT = {
    "name": "each test gives its own",
    "essential": "there is one container",
    "healthCheck": "the tests run its command themselves, as not every engine has a clock for it",
    "logConfiguration": "the engine keeps the logs",
    "resourceRequirements": "no GPU is promised here",
}
LINUX = {"initProcessEnabled", "sharedMemorySize", "capabilities"}


def arguments(container: Container, extra: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """What ECS makes of a container definition, as arguments of `docker run`, image and command last.

    Args:
        container: One of infra/containers.py.
        extra: More environment variables.
        kept: The engine's volume for each of the definition's that outlives its task; the others go with the container.
    """
    linux = container["linuxParameters"]
    assert set(container) <= TRANSLATED | set(LEFT_OUT), set(container)
    assert set(linux) == LINUX
    assert set(linux["capabilities"]) == {"drop"}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # an engine without a daemon can't give more than it has
    limits = {
        each["name"]: (min(each["softLimit"], most), min(each["hardLimit"], most)) for each in container["ulimits"]
    }
    environment = {each["name"]: each["value"] for each in container["environment"]} | dict(extra)
    return [
        *(["--init"] if linux["initProcessEnabled"] else []),
        *(["--read-only"] if container["readonlyRootFilesystem"] else []),
        *(f"--cap-drop={capability}" for capability in linux["capabilities"]["drop"]),
        f"--user={container['user']}",
        f"--memory={container['memory']}m",
        f"--shm-size={linux['sharedMemorySize']}m",
        f"--stop-timeout={container['stopTimeout']}",
        *(f"--ulimit={name}={soft}:{hard}" for name, (soft, hard) in limits.items()),
        *(f"--volume={_volume(mount, kept)}" for mount in container["mountPoints"]),
        *(f"--env={name}={value}" for name, value in environment.items()),
        # By name alone: its value is the engine's own environment, not a word of a command line.
        *(f"--env={secret['name']}" for secret in container["secrets"]),
        container["image"],
        *container["command"],
    ]


def _volume(mount: Mapping[str, str], kept: Mapping[str, str]) -> str:
    name, path = mount["sourceVolume"], mount["containerPath"]
    return f"{kept[name]}:{path}" if name in kept else path
