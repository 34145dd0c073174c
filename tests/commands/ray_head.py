"""A `ray-head` of the tests with two CPUs, with its desk and its watched dashboard as in the container."""

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

import psutil

from ray_on_ecs.contract import DOCUMENTS_VARIABLE, HEAD_STATE_VARIABLE
from ray_on_ecs.jobs.documents import Documents, HeadState
from ray_on_ecs.jobs.driver_parent import PROCESSES, identity
from ray_on_ecs.node import ports
from ray_on_ecs.node.ports import free_ports
from ray_on_ecs.storage.disk import Disk
from tests.commands.conftest import REPOSITORY
from tests.commands.head import ON_HEAD, SECONDS, TOKEN, WORKER_PORTS
from tests.local_cluster import start_ray
from tests.waiting import until

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
    """A running `ray-head` with its jobs.

    Attributes:
        process: Its process.
        log: Its output.
        folder: The folder of what outlives it.
        temporary: The folder of Ray's files and of all temporary files.
        environment: The variables of its container.
        gcs_port: The port of its GCS.
        dashboard: The URL of its dashboard.
        documents: The cluster's documents.
    """

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path
    temporary: Path
    environment: Mapping[str, str]
    gcs_port: int
    dashboard: str
    documents: Documents

    @property
    def shell(self) -> dict[str, str]:
        """The environment of a shell in its container."""
        return {**self.environment, **ON_HEAD, "RAY_ADDRESS": f"{ports.default_address()}:{self.gcs_port}"}

    @property
    def state(self) -> HeadState:
        """The state that it, or the head before, has written last."""
        return self.documents.read_head()[1]

    @property
    def jobs(self) -> dict[str, str]:
        """The status of each job, by ID."""
        return {job["submission_id"]: job["status"] for job in self.state.jobs}

    @property
    def is_healthy(self) -> bool:
        """Return whether its health check passes."""
        command = [sys.executable, "-c", RAY_HEALTH, str(self.gcs_port)]
        return subprocess.run(command, env=self.environment, timeout=SECONDS, check=False).returncode == 0

    def kill_driver(self) -> None:
        """Kill the driver of its only job, as the kernel does when memory runs out."""
        [driver] = self._drivers("driver")
        driver.kill()

    def kill(self) -> None:
        """Kill all processes, as the loss of the container does."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(SECONDS)

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes of the container, `ray-head` first."""
        first = [psutil.Process(self.process.pid), *self._drivers("parent", "driver")]
        return [*first, *(each for one in first for each in _children(one))]

    def _drivers(self, *names: str) -> list[psutil.Process]:
        """The drivers of its jobs, or their parents: those that a command in its shell has started, too."""
        found = []
        for file in Path(self.environment[HEAD_STATE_VARIABLE]).glob(f"jobs/*/{PROCESSES}"):
            for name, (pid, known) in json.loads(file.read_text()).items():
                found += [psutil.Process(pid)] if name in names and known and identity(pid) == known else []
        return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


@contextmanager
def ray_head(
    environment: Mapping[str, str],
    folder: Path,
    ray: Sequence[str] = (),
    documents: Documents | None = None,
    **variables: str,
) -> Generator[RayHead]:
    """Run `ray-head` with its state and its jobs' results below a folder, everything else in a separate one.

    Args:
        environment: The environment of the commands.
        folder: The folder of state, documents and results, with the subfolders `state`, `documents` and `runs`.
        ray: A command instead of the head's Ray.
        documents: The cluster's documents, in place of those in the folder.
        variables: Variables of its container.
    """
    dashboard, *rest = free_ports(1 + len(ports.HEAD))
    head_ports = dict(zip(ports.HEAD, [rest[0], dashboard, rest[1]], strict=True))
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets lie below it
    own = {
        **environment,
        **TOKEN,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{REPOSITORY / 'docker'}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_TMPDIR": temporary,
        "TMPDIR": temporary,
        "RAY_ON_ECS_STORAGE_PATH": str(folder / "runs"),
        HEAD_STATE_VARIABLE: str(folder / "state"),
        DOCUMENTS_VARIABLE: str(folder / "documents"),
        **variables,
    }
    given = json.dumps({"HEAD": head_ports, "NODE": {AGENT_PORT: rest[2], **WORKER_PORTS}, "RAY": ray})
    try:
        log = folder / f"head-{dashboard}.log"
        known = documents or Documents(Disk(), own[DOCUMENTS_VARIABLE])
        before = known.read_head()[1].head
        process = start_ray([sys.executable, "-c", RAY_HEAD, given], own, log)
        url = f"http://127.0.0.1:{dashboard}"
        head = RayHead(process, log, folder, Path(temporary), own, head_ports["--port"], url, known)
        try:
            until(lambda: head.state.head != before and head.state.ray, why=log.read_text)
            yield head
        finally:
            if process.poll() is None:
                head.kill()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
