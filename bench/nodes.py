"""A Ray cluster of several nodes on this machine, whose parts can be killed one by one: for tests and drills."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

REPOSITORY = Path(__file__).parents[1]
HERE = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 90.0, 30.0
RAY = str(Path(sys.executable).with_name("ray"))


class Nodes:
    """A head without CPUs and workers with one each, every one started by `ray start --block` as in its container.

    Args:
        workers: How many.
        variables: Environment variables of all nodes.
    """

    def __init__(self, workers: int, variables: Mapping[str, str] | None = None) -> None:
        self._count = workers
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRAINING_"))},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            **(variables or {}),
        }
        self.head: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Nodes:
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.port = free_port()
        self.environment["RAY_ADDRESS"] = f"{HERE}:{self.port}"
        dashboard = [f"--dashboard-port={free_port()}", f"--ray-client-server-port={free_port()}"]
        head = ["--head", f"--port={self.port}", "--num-cpus=0", f"--temp-dir={self._folder.name}", *dashboard]
        self.head = self._start(*head)
        until(self._answers, START_SECONDS)
        for _ in range(self._count):
            self.add_worker()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in [*self.workers, self.head]:
            if each is not None:
                end(each.pid)
                each.wait()
        self._folder.cleanup()

    def add_worker(self) -> subprocess.Popen[bytes]:
        """Start one more worker; its raylet is there on return: two that start at once would take one socket's name."""
        before = self._sockets()
        worker = self._start(f"--address={HERE}:{self.port}", "--num-cpus=1")
        self.workers.append(worker)
        until(lambda: self._sockets() - before, START_SECONDS)
        return worker

    def replace_ended(self) -> None:
        """What ECS does: another worker for each that has ended."""
        for each in [worker for worker in self.workers if worker.poll() is not None]:
            self.workers.remove(each)
            end(each.pid)
            self.add_worker()

    def train(self, *flags: str, log: IO[Any]) -> subprocess.Popen[bytes]:
        """Start the training command as the head's driver."""
        return subprocess.Popen(
            [sys.executable, "-m", "training", *flags],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def processes(self, worker: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
        """A worker node's processes whose command line or title holds `name`, `raylet` or `RayTrainWorker`."""
        try:
            return [each for each in psutil.Process(worker.pid).children(recursive=True) if name in _title(each)]
        except psutil.NoSuchProcess:
            return []

    def trainers(self) -> list[psutil.Process]:
        """The processes that train, on all nodes."""
        running = [worker for worker in self.workers if worker.poll() is None]
        return [each for worker in running for each in self.processes(worker, "RayTrainWorker")]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            *(RAY, "start", f"--node-ip-address={HERE}", "--num-gpus=0", "--object-store-memory=100000000", "--block"),
            *("--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"),
            *arguments,
        ]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPOSITORY
        )

    def _sockets(self) -> set[Path]:
        return set(Path(self._folder.name).glob("session_*/sockets/raylet*"))

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HERE, self.port)) == 0


def end(pid: int) -> None:
    """Kill a process and all that it has started."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        kill(each.pid)
    psutil.wait_procs(family, timeout=STOP_SECONDS)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def until(condition: Callable[[], Any], seconds: float, between: float = 0.1) -> Any:
    """Wait for a condition to hold; what it holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(between)
    return found


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
