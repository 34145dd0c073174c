"""The end of a run by each cause, on a head and on one machine: effect on its script, exit status, and final state."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.config import LOCAL_VARIABLE
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from tests.commands.head import SECONDS, Head, commands, scripts, started
from tests.commands.terminal import Terminal
from tests.local_cluster import DIRECT, command_line, have_ended
from tests.waiting import until

# Waits for SIGTERM and then records it; or, on rank 1, ends as its argument says once all ranks run.
SCRIPT = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path

rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
folder = Path(os.environ["MARKS"])

def save(number, frame):
    Path(f"kept-{rank}").touch()
    (folder / f"saved-{rank}-{restart}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
part = folder / f"{rank}-{restart}.part"
part.write_text(str(os.getpid()))
part.rename(folder / f"begun-{rank}-{restart}")
cause = sys.argv[1]
while not all((folder / f"begun-{each}-{restart}").exists() for each in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.05)
if rank == "1" and cause == "raises":
    raise RuntimeError("of rank 1")
if rank == "1" and cause == "leaves":
    sys.exit(0)
if rank == "0" and cause == "leaves":
    with suppress(ProcessLookupError):
        while True:
            os.kill(int((folder / "begun-1-0").read_text()), 0)
            time.sleep(0.05)
    time.sleep(1.5)
    raise ConnectionError("its peer is gone")
if restart == "1":
    sys.exit(0)
time.sleep(600)
"""


@dataclass
class Run:
    """A run of the script that has begun on all ranks."""

    name: str
    command: subprocess.Popen[Any]
    folder: Path
    marks_folder: Path
    terminal: Terminal | None

    @property
    def marks(self) -> set[str]:
        """The marks that the script has set outside its working directory."""
        return {path.name for path in self.marks_folder.iterdir()}

    @property
    def kept(self) -> set[str]:
        """The files of the run's last snapshot."""
        return set(read_snapshot(RunStorage.open(str(self.folder.parent), self.folder.name)).files)

    def pid(self, rank: int, restart: int = 0) -> int:
        return int((self.marks_folder / f"begun-{rank}-{restart}").read_text())

    @property
    def state(self) -> str:
        return json.loads((self.folder / "status.json").read_text())["state"]

    def end(self) -> tuple[int, str]:
        """Wait for the command's end; return its exit status and its output."""
        out, err = self.command.communicate(timeout=SECONDS)
        assert not scripts("ends.py", self.folder)
        return self.command.returncode, out + err


Start = Callable[..., Run]


def _worker(script: int) -> psutil.Process:
    """Return the worker whose script this is: it holds the pipe that its supervisor listens to."""
    pipe = os.readlink(f"/proc/{psutil.Process(script).ppid()}/fd/0")
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended meanwhile
            if "ScriptActor" in command_line(process) and pipe in _open_files(process.pid):
                return process
    raise LookupError(f"no worker has the script {script}")


def _open_files(pid: int) -> set[str]:
    names = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.add(os.readlink(descriptor))
    return names


@dataclass(frozen=True)
class Machine:
    """This machine without Ray, as with `--local`."""

    storage: Path

    @property
    def variables(self) -> dict[str, str]:
        return {LOCAL_VARIABLE: "1", "RAY_ON_ECS_STORAGE_PATH": str(self.storage)}


@pytest.fixture(params=["head", pytest.param("machine", marks=pytest.mark.smoke)])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head | Machine:
    if request.param == "head":
        return request.getfixturevalue("head")
    return Machine(tmp_path_factory.mktemp("machine"))


HEAD = pytest.mark.parametrize("home", ["head"], indirect=True)


@pytest.fixture
def start(environment: dict[str, str], home: Head | Machine, tmp_path: Path) -> Iterator[Start]:
    """Start the script without a job, or by another module and its arguments."""
    code, marks = tmp_path / "code", tmp_path / "marks"
    code.mkdir()
    marks.mkdir()
    (code / "ends.py").write_text(SCRIPT)
    name = f"ends-{tmp_path.name}".replace("_", "-").replace("[", "").replace("]", "")

    def start(
        cause: str,
        *flags: str,
        num_workers: int = 2,
        module: str = DIRECT,
        begins: bool = True,
        on: Head | Machine | None = None,
        in_terminal: bool = False,
    ) -> Run:
        of_run = on or home
        variables = {**environment, **of_run.variables}
        words = []
        if module == "ray_on_ecs" and isinstance(of_run, Head):
            variables, words = of_run.shell, ["run"]
        own = ("--run-name", name, "--env", f"MARKS={marks}", *flags)
        arguments = (*words, "--num-workers", str(num_workers), *own, "ends.py", cause)
        terminal = None
        if in_terminal:
            program = [module] if module.endswith(".py") else ["-m", module]
            terminal = Terminal([sys.executable, *program, *arguments], variables, code)
            opened.callback(terminal.close)
            command: subprocess.Popen[Any] = terminal.command
        else:
            command = opened.enter_context(commands(module, variables, code))(*arguments)
        run = Run(name, command, of_run.storage / name, marks, terminal)
        begun = {f"begun-{rank}-0" for rank in range(num_workers)}
        until(lambda: begun <= run.marks or run.command.poll() is not None)
        assert not begins or run.command.poll() is None, run.command.communicate()
        return run

    with ExitStack() as opened:
        yield start


SAVED = {"saved-0-0", "saved-1-0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_terminated_driver_gives_scripts_their_grace_period(start: Start, number: signal.Signals) -> None:
    run = start("waits")
    run.command.send_signal(number)
    status, output = run.end()
    assert status == 130, output
    assert output.endswith(f"ray-on-ecs: stopped; the same command with --run-name {run.name} resumes the run\n")
    assert run.marks >= SAVED
    assert run.kept == {"kept-0", "kept-1"}
    assert run.state == "interrupted"
    assert f"--run-name {run.name}" in (run.folder / "report.html").read_text()


def test_closed_terminal_ends_the_driver(start: Start) -> None:
    run = start("waits", num_workers=1, in_terminal=True)
    assert run.terminal
    run.terminal.close()
    assert run.command.wait(SECONDS) == 129
    assert "saved-0-0" in run.marks
    assert run.state == "interrupted"
    assert not scripts("ends.py", run.folder)


@HEAD
def test_script_of_a_killed_worker_has_grace_period(start: Start) -> None:
    run = start("waits")
    _worker(run.pid(1)).kill()
    status, said = run.end()
    assert status == 0, said
    assert "; restarting" in said
    assert run.marks >= SAVED
    assert {"begun-0-1", "begun-1-1"} <= run.marks
    assert run.state == "finished"


@HEAD
@pytest.mark.fault
def test_scripts_of_a_killed_head_have_grace_period(
    environment: dict[str, str], aws_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory, start: Start
) -> None:
    with started({**environment, **aws_variables}, tmp_path_factory.mktemp("own")) as own:
        run = start("waits", on=own)
        processes = [psutil.Process(run.pid(rank)) for rank in range(2)]
        own.kill()
        until(lambda: have_ended(processes))
        run.command.kill()
        run.command.communicate(timeout=SECONDS)
    assert run.marks >= SAVED
    assert run.state == "training"


def test_scripts_of_a_killed_driver_end_gracefully(start: Start) -> None:
    run = start("waits", num_workers=1)
    process = psutil.Process(run.pid(0))
    run.command.kill()
    until(lambda: have_ended([process]))
    assert "saved-0-0" in run.marks
    run.command.communicate(timeout=SECONDS)
    assert run.state == "training"


@HEAD
def test_stopped_job_gives_scripts_their_grace_period(start: Start, head: Head) -> None:
    run = start("waits", num_workers=1, module="ray_on_ecs")
    with commands("ray_on_ecs", head.shell, run.folder) as typed:
        assert typed("stop", run.name).wait(SECONDS) == 0
    status, said = run.end()
    assert status == 130, said
    assert "saved-0-0" in run.marks
    assert run.kept == {"kept-0"}
    assert run.state == "interrupted"


def test_repeated_exception_of_a_rank_ends_the_run(start: Start) -> None:
    run = start("raises", begins=False)
    status, said = run.end()
    assert status == 1, said
    assert said.count("; restarting") == 1
    what = "training failed on rank 1: ends.py ended with exit status 1: RuntimeError: of rank 1"
    assert f"{what} (the same error twice); see " in said
    assert {"saved-0-0", "begun-0-1"} <= run.marks
    assert run.kept == {"kept-0"}
    assert run.state == "failed"
    error = json.loads((run.folder / "error.json").read_text())
    assert error["rank"] == 1
    assert error["log"][-1] == "RuntimeError: of rank 1"


def test_rank_with_an_early_exit_is_named(start: Start) -> None:
    run = start("leaves", "--max-restarts", "0", begins=False)
    status, said = run.end()
    assert status == 1, said
    assert "training failed on rank 0: ends.py ended with exit status 1: ConnectionError: its peer is gone" in said
    assert "; rank 1 had ended with exit status 0, " in said
    assert run.state == "failed"


LOGS = """
import logging
logging.basicConfig(level=logging.DEBUG, format="mine %(name)s %(message)s")
logging.getLogger("ray_on_ecs.run").debug("of the script")
print("handlers", len(logging.getLogger("ray_on_ecs").handlers), flush=True)
"""


def test_debug_lines_stand_once_among_the_output(start: Start, home: Head | Machine, tmp_path: Path) -> None:
    (tmp_path / "code" / "ends.py").write_text(LOGS)
    status, said = start("", "--env", "RAY_ON_ECS_LOG=debug", num_workers=1, begins=False).end()
    assert status == 0, said
    lines = said.splitlines()

    def place(text: str, module: str = "") -> int:
        """The only line that has a text, and that begins as this module's do."""
        [number] = [number for number, line in enumerate(lines) if text in line and module in line]
        return number

    begun = place("rank 0: the script has been started in ", "Z DEBUG ray_on_ecs.run.worker ")
    ended = place("rank 0: the script has ended with 0", "Z DEBUG ray_on_ecs.run.worker ")
    assert begun < place("handlers 0") < ended
    assert begun < place("mine ray_on_ecs.run of the script") < ended
    if isinstance(home, Head):
        place("Z DEBUG ray_on_ecs.run.ray_cluster ray-on-ecs: joined the Ray cluster at ")
    place("Z DEBUG ray_on_ecs.run.driver ray-on-ecs: all scripts have been started")
    assert any(line.startswith("finished in ") for line in lines)
