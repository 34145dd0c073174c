"""A `ray-head` of the tests with two CPUs, which watches its jobs and its dashboard as in the container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ray_on_ecs.contract import HEAD_STATE_VARIABLE
from ray_on_ecs.node import ports
from ray_on_ecs.node.ports import free_ports
from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, TOKEN, WORKER_PORTS
from tests.local_cluster import command_line, start_ray
from tests.waiting import until

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# `ray-head` on the ports that the first argument gives.
RAY_HEAD = """
import json, sys
from ray_on_ecs.node import head, ports
given = json.loads(sys.argv.pop(1))
ports.HEAD.update(given["HEAD"])
ports.NODE.clear()
ports.NODE.update(given["NODE"])
ports.GCS, ports.DASHBOARD = given["HEAD"]["--port"], given["HEAD"]["--dashboard-port"]
sys.argv[1:] = ["--num-cpus=2", "--object-store-memory=100000000"]
head.RAY = given["RAY"] or head.RAY
head.main()
"""
# `ray-health head` for the GCS on the port that the first argument gives.
RAY_HEALTH = """
import sys
from ray_on_ecs.node import health, ports
ports.GCS = int(sys.argv.pop(1))
sys.argv[1:] = ["head"]
sys.exit(health.main())
"""
AGENT_PORT = "--dashboard-agent-listen-port"


@dataclass(frozen=True)
class RayHead:
    """A running `ray-head` with its jobs."""

    process: subprocess.Popen[bytes]
    dashboard: str
    log: Path
    environment: Mapping[str, str]
    gcs_port: int

    @property
    def client(self) -> JobSubmissionClient:
        """A client of its Jobs API, which must answer."""
        from ray.job_submission import JobSubmissionClient  # takes a second

        return JobSubmissionClient(self.dashboard, headers={"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"})

    @property
    def jobs(self) -> dict[str, str]:
        """The status of each submitted job, by ID."""
        listed: list[Any] = self.client.list_jobs()
        return {job.submission_id: job.status.value for job in listed if job.submission_id}

    def has_jobs(self, *wanted: str) -> bool:
        """Return whether it answers and has these jobs; a busy dashboard does not always answer."""
        try:
            return self.jobs.keys() >= set(wanted)
        except (OSError, RuntimeError):
            return False

    @property
    def is_healthy(self) -> bool:
        """Return whether its health check passes."""
        command = [sys.executable, "-c", RAY_HEALTH, str(self.gcs_port)]
        return subprocess.run(command, env=self.environment, timeout=SECONDS, check=False).returncode == 0

    def kill_driver(self) -> None:
        """Kill the driver of its only job, as the kernel does when memory runs out."""
        [driver] = [each for each in self.processes if " -m ray_on_ecs.run " in command_line(each)]
        driver.kill()

    def kill(self) -> None:
        """Kill all processes, as the loss of the container does."""
        for each in self.processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(SECONDS)

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes of the container, `ray-head` first."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


@contextmanager
def ray_head(environment: Mapping[str, str], folder: Path, ray: Sequence[str] = ()) -> Generator[RayHead]:
    """Run `ray-head` with its state and its jobs' results below a folder, everything else in a separate one.

    Args:
        environment: The environment of the commands.
        folder: The folder of state and results, with the subfolders `state` and `runs`.
        ray: A command instead of the head's Ray.
    """
    dashboard, *rest = free_ports(1 + len(ports.HEAD))
    head_ports = dict(zip(ports.HEAD, [rest[0], dashboard, rest[1]], strict=True))
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets lie below it
    variables = {
        **environment,
        **TOKEN,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{REPOSITORY / 'docker'}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_TMPDIR": temporary,
        "RAY_ON_ECS_STORAGE_PATH": str(folder / "runs"),
        HEAD_STATE_VARIABLE: str(folder / "state"),
    }
    given = json.dumps({"HEAD": head_ports, "NODE": {AGENT_PORT: rest[2], **WORKER_PORTS}, "RAY": ray})
    try:
        head = _start([sys.executable, "-c", RAY_HEAD, given], variables, folder, head_ports)
        try:
            yield head
        finally:
            if head.process.poll() is None:
                head.kill()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _start(command: list[str], environment: Mapping[str, str], folder: Path, given: Mapping[str, int]) -> RayHead:
    """Start a head, and wait until it answers."""
    dashboard = given["--dashboard-port"]
    log = folder / f"head-{dashboard}.log"
    process = start_ray(command, environment, log)
    head = RayHead(process, f"http://127.0.0.1:{dashboard}", log, environment, given["--port"])
    try:
        until(head.has_jobs, why=log.read_text)
    except BaseException:
        head.kill()
        raise
    return head
