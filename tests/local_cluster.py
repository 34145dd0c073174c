"""A Ray cluster of several nodes on this machine, whose processes tests and drills kill one by one."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from ray_on_ecs.node.ports import free_ports, listens
from tests.waiting import until

REPOSITORY = Path(__file__).parents[1]
HOST = "127.0.0.1"
# A variable that all processes of a node have.
NODE_MARK = "RAY_ON_ECS_TEST_NODE"
# Starts a run without a job.
DIRECT = str(Path(__file__).parent / "direct_run.py")
# On a busy machine Ray's servers give up after 30 seconds.
STARTS = 6
# The output of `ray start` when the node runs.
STARTED = "Ray runtime started"
# Ray's line on a port of its dashboard that another process has; the node then runs without a dashboard.
OCCUPIED = "already occupied"
LOG_CHARACTERS = 3000
# Open MPI distinguishes nodes by their host names. On a shared machine some processes may take another node's processes
# for local ones: two ranks then choose different algorithms for one collective, and wait forever.
OPEN_MPI = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_coll": "^han,sm"}
# Settings of torch and Ray for a machine that is busy with other work, or has a full disk.
BUSY_MACHINE = {
    # Threads that wait for each other are a hundred times slower there.
    "OMP_NUM_THREADS": "1",
    # Ray's default of 15 would leave its workers a thirtieth of a core.
    "RAY_worker_niceness": "0",
    # It takes seconds of both cores; its own tests switch it on.
    "RAY_ON_ECS_NETWORK_CHECK": "off",
    # Ray warns on stderr when a disk is 95 % full, between the lines that tests compare.
    "RAY_local_fs_capacity_threshold": "1",
}
# The label that the image gives to CPU workers.
CPU_WORKER = "ray.io/node-group=cpu-workers"
RAY = str(Path(sys.executable).with_name("ray"))


class LocalCluster:
    """A head node without CPUs and worker nodes with one CPU each, started by `ray start --block` as in the containers.

    A context: its nodes run as long as it is open.

    Args:
        workers: The number of worker nodes.
        variables: Environment variables of all nodes and of the training commands.

    Attributes:
        environment: All environment variables of the nodes.
        head: The head node's process.
        workers: The worker nodes' processes.
        cpu_workers: The CPU workers' processes.
        addresses: The address of each node, by the ID of its process.
    """

    def __init__(self, workers: int, variables: Mapping[str, str] | None = None) -> None:
        self._count = workers
        self._numbers = itertools.count()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **BUSY_MACHINE,
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray declares a node dead after five failed health checks. A node that has ended refuses them at once; a
            # slow one still has the full time for each.
            "RAY_health_check_period_ms": "500",
            **OPEN_MPI,
            **(variables or {}),
        }
        self.head: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.cpu_workers: list[subprocess.Popen[bytes]] = []
        self.addresses: dict[int, str] = {}

    def __enter__(self) -> LocalCluster:
        try:
            self._start_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_all(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.port, dashboard, client = free_ports(3)
        self.environment["RAY_ADDRESS"] = f"{HOST}:{self.port}"
        ports = [f"--port={self.port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
        self.head = self._start_node("--head", *ports, "--num-cpus=0", f"--temp-dir={self._folder.name}")
        for _ in range(self._count):
            self.add_worker()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in [*self.workers, *self.cpu_workers, self.head]:
            if each is not None:
                kill_tree(each.pid)
                each.wait()
        self.workers, self.cpu_workers, self.head = [], [], None
        self._folder.cleanup()

    def start_again(self) -> None:
        """End all nodes, and start a head with as many worker nodes, as ECS does when a head is lost."""
        self.__exit__(None, None, None)
        self._start_all()

    def add_worker(self, *flags: str, cpus: int = 1) -> subprocess.Popen[bytes]:
        """Start another worker node; two that start at once would choose the same name for a socket."""
        worker = self._start_node(f"--address={HOST}:{self.port}", f"--num-cpus={cpus}", *flags)
        self.workers.append(worker)
        return worker

    def add_cpu_worker(self) -> subprocess.Popen[bytes]:
        """Start a CPU worker's node."""
        cpu_worker = self._start_node(f"--address={HOST}:{self.port}", "--num-cpus=1", f"--labels={CPU_WORKER}")
        self.cpu_workers.append(cpu_worker)
        return cpu_worker

    def replace_ended(self) -> None:
        """Start a worker node for each one that has ended, as ECS does."""
        for ended in [worker for worker in self.workers if worker.poll() is not None]:
            self.workers.remove(ended)
            kill_tree(ended.pid)
            self.add_worker()

    def start_training(self, *flags: str, log: IO[Any]) -> subprocess.Popen[bytes]:
        """Start a run whose driver is on the head node."""
        return subprocess.Popen(
            [sys.executable, DIRECT, *flags],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def worker_processes(self, node: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
        """Return a worker node's processes whose title contains `title`, such as `raylet/raylet`."""
        return _descendants(node.pid, title)

    def head_processes(self, title: str) -> list[psutil.Process]:
        """Return the head node's processes whose title contains `title`, such as `gcs_server`."""
        return _descendants(self.head.pid, title) if self.head else []

    def actors(self) -> list[psutil.Process]:
        """Return the processes of workers on all nodes."""
        running = [node for node in self.workers if node.poll() is None]
        return [process for node in running for process in self.worker_processes(node, "ScriptActor")]

    def script_processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a script on all nodes, without their supervisors."""
        running = [node for node in self.workers if node.poll() is None]
        found = [process for node in running for process in self.worker_processes(node, name)]
        return [each for each in found if "supervisor.py" not in command_line(each)]

    def _start_node(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a node with a separate address and temporary folder, as on a separate machine."""
        number, [agent] = next(self._numbers), free_ports(1)
        address = f"127.0.{number // 250}.{number % 250 + 1}"  # HOST is the first one's
        command = [
            *(RAY, "start", f"--node-ip-address={address}", "--num-gpus=0", "--object-store-memory=100000000"),
            *("--block", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--dashboard-agent-listen-port={agent}", *arguments),
        ]
        folder = Path(self._folder.name) / f"node-{number}"
        folder.mkdir()
        node = start_ray(
            command, {**self.environment, "TMPDIR": str(folder), NODE_MARK: str(folder)}, folder / "ray-start.log"
        )
        self.addresses[node.pid] = address
        return node


def start_ray(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `ray start --block` and wait until its node runs; start it again if Ray gives up, as ECS does.

    The node and the server for Ray clients give up after 30 seconds, which is too short for a busy machine.

    Args:
        command: The command.
        environment: Its environment.
        log: A file for its output.

    Raises:
        RuntimeError: It ended several times; the message has its output.
    """
    client = [int(word.partition("=")[2]) for word in command if word.startswith("--ray-client-server-port=")]

    def runs() -> bool:
        return STARTED in log.read_text() and all(map(listens, client))

    for _ in range(STARTS):
        with log.open("wb") as file:
            node = subprocess.Popen(
                command,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        try:
            until(lambda node=node: runs() or node.poll() is not None, why=log.read_text)
        except BaseException:
            kill_tree(node.pid)
            raise
        if node.poll() is None and OCCUPIED not in log.read_text():
            return node
        kill_session(node.pid)
    raise RuntimeError(f"a Ray node did not start in {STARTS} attempts: {log.read_text()[-LOG_CHARACTERS:]}")


def kill_session(pid: int) -> None:
    """Kill what remains of a session after its first process has ended, and wait until its ports are free."""
    family = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            family += [process] if os.getsid(process.pid) == pid else []
    for process in family:
        kill(process.pid)
    until(lambda: have_ended(family))


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, and wait for them to end."""
    try:
        family = [psutil.Process(pid), *family_of(pid)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        kill(process.pid)
    until(lambda: have_ended(family))


def have_ended(processes: Sequence[psutil.Process]) -> bool:
    """Return whether all of them have ended. Zombies have ended, even before their parent or init reaps them."""
    return not any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    """Send SIGKILL to a process if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int, title: str) -> list[psutil.Process]:
    """Return the processes of a node whose command line contains `title`: Ray writes an actor's name into it."""
    return [each for each in family_of(pid) if title in command_line(each)]


def family_of(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, and what belongs to its node: supervisors of scripts are not descendants."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        family = first.children(recursive=True)
        mark = first.environ().get(NODE_MARK)
        for process in psutil.process_iter() if mark else ():
            with suppress(psutil.Error):
                if process.pid != pid and process not in family and process.environ().get(NODE_MARK) == mark:
                    family.append(process)
    return family


def command_line(process: psutil.Process) -> str:
    """Return a process's command line, its words joined by spaces; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
