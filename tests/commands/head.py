"""A Ray head of the tests with two CPUs and, as in a cluster, a token and a dashboard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import psutil

from ray_on_ecs.contract import HEAD_STATE_VARIABLE, SECRETS_VARIABLE, secrets_prefix
from ray_on_ecs.node.ports import flags, free_ports, listens
from ray_on_ecs.run import supervisor
from tests.local_cluster import have_ended, kill_session, start_ray
from tests.waiting import until

# As in the image.
ON_HEAD = {"RAY_ON_ECS_CLUSTER": "head"}
SECRETS = {SECRETS_VARIABLE: secrets_prefix("tests")}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-tests"}
PORTS = ("--port", "--dashboard-port", "--dashboard-agent-listen-port", "--ray-client-server-port")
COMMAND = ("ray", "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000")
# Any free port: on one machine, the workers of two heads would try the same ports, from 10002.
WORKER_PORTS = {"--min-worker-port": 0, "--max-worker-port": 0}
# Ends a hang.
SECONDS = 480


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        address: Its address for drivers, `host:port`.
        dashboard: The URL of its dashboard.
        storage: The storage path in the environment of its jobs, as on a stack.
        temporary: The folder of Ray's files, of the jobs' records and logs, and of all temporary files of the jobs.
        environment: The variables of its container.
        process: Its process, the first of a session.
    """

    address: str
    dashboard: str
    storage: Path
    temporary: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill all its processes at once, except the scripts, which run in separate sessions."""
        os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which a driver joins it."""
        place = {"RAY_ON_ECS_STORAGE_PATH": str(self.storage), "TMPDIR": str(self.temporary)}
        return {**TOKEN, "RAY_ADDRESS": self.address, **place}

    @property
    def shell(self) -> dict[str, str]:
        """The environment of a shell in its container, where `ray-on-ecs run` starts drivers as the head does."""
        return {**self.environment, **self.variables, **ON_HEAD, HEAD_STATE_VARIABLE: str(self.temporary / "state")}


@contextmanager
def started(environment: Mapping[str, str], storage: Path) -> Generator[Head]:
    """A head on free ports, with the variables of this environment."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets lie below it
    own = {
        **TOKEN,
        "RAY_TMPDIR": temporary,
        "TMPDIR": temporary,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_ON_ECS_STORAGE_PATH": str(storage),
    }
    command = [*COMMAND, "--node-ip-address=127.0.0.1", *flags(ports | WORKER_PORTS)]
    log = storage / "head.log"
    process = start_ray(command, {**environment, **own}, log)
    dashboard = f"http://127.0.0.1:{ports['--dashboard-port']}"
    try:
        until(lambda: _answers(f"{dashboard}/api/gcs_healthz"), SECONDS, log.read_text)
        until(lambda: listens(ports["--dashboard-agent-listen-port"]), SECONDS)
        yield Head(f"127.0.0.1:{ports['--port']}", dashboard, storage, Path(temporary), environment, process)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            kill_session(process.pid)
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def commands(
    module: str, environment: Mapping[str, str], folder: Path
) -> Generator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts `python -m MODULE`, a file or some code, and ends the process at last."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str, code: str | None = None, **variables: str) -> subprocess.Popen[str]:
        program = ["-c", code] if code else [module] if module.endswith(".py") else ["-m", module]
        begun.append(
            subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=folder,
                env={**environment, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return begun[-1]

    try:
        yield start
    finally:
        for process in begun:
            if process.poll() is None:  # a test has failed, or needs no more output
                process.terminate()
            process.communicate(timeout=SECONDS)


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    """The output of a command to the first line with `wanted`; the rest is left for `communicate`."""
    assert process.stdout
    seen = ""
    while wanted not in seen:
        line = _read_line(process.stdout.fileno())
        if not line and process.poll() is not None:
            output = process.stderr.read() if process.stderr else ""
            raise AssertionError(f"it ended with {process.returncode} before {wanted!r}: {seen}{output}")
        seen += line
    return seen


def _read_line(descriptor: int) -> str:
    """Read only a line: `communicate` would not see data in Python's buffer."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line.decode()


def scripts(name: str, storage: Path) -> list[psutil.Process]:
    """The processes of a script in the runs below a storage path, without their supervisors."""
    return _processes_below(storage, lambda words: words[1:3] == ["-u", name])


def programs(run: Path) -> list[psutil.Process]:
    """The processes of the Ray program of a run, without their supervisors."""
    own = "ray_on_ecs.run.program.main"
    return _processes_below(run, lambda words: own in words and supervisor.__file__ not in words)


def _processes_below(folder: Path, is_wanted: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """The running processes with such a command line whose run is in a folder: others may test on this machine."""
    running = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if is_wanted(process.cmdline()) and not have_ended([process]):
                run = Path(process.environ().get("RUN_URI", "/"))
                running += [process] if run.is_relative_to(folder) else []
    return running


def _answers(url: str) -> bool:
    """Return whether the dashboard is up, which needs no token."""
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except (OSError, HTTPException):
        return False
