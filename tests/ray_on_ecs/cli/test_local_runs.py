"""`ray-on-ecs --local` with a driver in the place of ours: its log, its end, and who outlives whom."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands.head import SECONDS, commands, read_until
from tests.commands.terminal import Terminal
from tests.local_cluster import have_ended
from tests.waiting import until

REPOSITORY = Path(__file__).parents[3]
# The command, with the driver that the variable DRIVER names.
COMMAND = """
import os, sys
from ray_on_ecs.cli.main import main
from ray_on_ecs.jobs import machine
machine.DRIVER = (os.environ["DRIVER"],)
status = main()
print(*sys.modules, file=open(os.environ["MODULES"], "w"))
sys.exit(status)
"""
# Does what its script's argument says; the script itself is not run.
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
_, do = json.loads((folder / "run.json").read_text())["settings"]["command"]
job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]

def write(name, **document):
    (folder / f"{name}.new").write_text(json.dumps(document))
    (folder / f"{name}.new").rename(folder / f"{name}.json")

def end(number, frame):
    write("status", state="interrupted", job=job, started="2026-11-28T00:00:00+00:00")
    print("has saved", flush=True)
    print("ray-on-ecs: stopped; the same command with --run-name mine resumes the run", flush=True)
    sys.exit(130)

signal.signal(signal.SIGTERM, signal.SIG_IGN if do == "stubborn" else end)
write("status", state="training", job=job, started="2026-11-28T00:00:00+00:00")
print("begins", flush=True)
if do.isdecimal():
    sys.exit(int(do))
if do == "wrapped":
    write("result")
    print("finished", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if do == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
AGAIN = "nothing is stored yet, so the same command with --run-name mine starts from the beginning"
Start = Callable[..., subprocess.Popen[str]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
    return {
        **kept,
        **own,
        "TOKEN": "hf_12345",
        "DRIVER": str(tmp_path / "driver.py"),
        "MODULES": str(tmp_path / "modules"),
    }


@pytest.fixture
def start(variables: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Start `ray-on-ecs VERB --local …` in a folder with a script."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    (tmp_path / "driver.py").write_text(DRIVER)
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    with commands(str(command), variables, code) as start:
        yield lambda verb, *words: start(verb, "--local", *words)
    for driver in drivers(tmp_path):
        with suppress(psutil.NoSuchProcess):
            driver.kill()


@pytest.fixture
def run(start: Start) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        process = start(*words)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, err

    return run


def drivers(home: Path) -> list[psutil.Process]:
    """The drivers of all jobs that have started, whether they run or not."""
    found = []
    for file in home.glob(".ray-on-ecs/jobs/*/*/processes.json"):
        pid, _ = json.loads(file.read_text())["driver"]
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


MINE = ("--run-name", "mine", "train.py")


@pytest.mark.parametrize("status", [0, 1, 2, 3, 130])
def test_command_has_the_status_of_its_driver(run: Run, tmp_path: Path, status: int) -> None:
    found, out, err = run("run", *MINE, str(status))
    assert found == status, out + err
    assert out == "run mine is submitted as job mine\nbegins\n"
    assert err.startswith(f"copying {tmp_path}/code\n")
    assert have_ended(drivers(tmp_path))
    heavy = {"ray", "torch", "boto3", "botocore", "grpc", "aiohttp", "pyarrow"}
    assert not heavy & set((tmp_path / "modules").read_text().split())


@pytest.mark.parametrize(
    ("do", "status", "last"),
    [
        ("killed", 137, f"ray-on-ecs: job mine was ended by signal 9; {AGAIN}"),
        ("wrapped", 0, "ray-on-ecs open --local mine shows its report"),
    ],
)
def test_last_line_says_how_a_killed_driver_goes_on(run: Run, do: str, status: int, last: str) -> None:
    found, out, err = run("run", *MINE, do)
    assert (found, err.splitlines()[-1]) == (status, last), out
    if not status:
        assert out.splitlines()[-1].startswith("run mine is finished, although job mine was ended by signal 9; ")
    found, out, err = run("logs", "--follow", "mine")
    assert found == status, err
    assert out.startswith("begins\n")


def test_secret_of_a_killed_driver_is_deleted(start: Start, run: Run, tmp_path: Path) -> None:
    def secrets() -> list[Path]:
        return [
            path for path in (tmp_path / ".ray-on-ecs").rglob("*") if path.is_file() and b"hf_123" in path.read_bytes()
        ]

    process = start("run", "--secret", "TOKEN", *MINE, "wait")
    read_until(process, "begins")
    assert secrets()
    [driver] = drivers(tmp_path)
    assert "hf_123" not in str(driver.environ())
    driver.kill()
    assert process.wait(SECONDS) == 137
    assert not secrets()


def test_ctrl_c_stops_the_run(start: Start, tmp_path: Path) -> None:
    process = start("run", *MINE, "wait")
    read_until(process, "begins")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, out
    assert "has saved" in out.splitlines(), "the log goes on"
    assert "ray-on-ecs: stopped" not in out, "without the driver's last line"
    assert err.splitlines()[-2:] == [
        "stopping run mine, whose script has 30 s to save; press Ctrl-C again to kill it",
        f"ray-on-ecs: run mine is stopped; {AGAIN}",
    ]
    assert json.loads((tmp_path / "code/results/mine/status.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_ctrl_c_that_also_ends_the_program_behind_a_pipe_stops_the_run(
    start: Start, tmp_path: Path, closed: tuple[str, ...]
) -> None:
    process = start("run", *MINE, "wait")
    read_until(process, "begins")
    for name in closed:  # as tee, of `2>&1 | tee`, that the same Ctrl-C has ended
        getattr(process, name).close()
        setattr(process, name, None)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert have_ended(drivers(tmp_path))
    assert json.loads((tmp_path / "code/results/mine/status.json").read_text())["state"] == "interrupted"


def test_second_ctrl_c_kills_the_run(start: Start, tmp_path: Path) -> None:
    process = start("run", *MINE, "stubborn")
    read_until(process, "begins")
    process.send_signal(signal.SIGINT)
    assert process.stderr
    while "press Ctrl-C again" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"ray-on-ecs: run mine was killed; {AGAIN}"
    assert have_ended(drivers(tmp_path))


def test_closed_terminal_stops_the_run(start: Start, variables: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, str(tmp_path / "command.py"), "run", "--local", *MINE, "wait"]
    terminal = Terminal(command, variables, tmp_path / "code")
    status = tmp_path / "code/results/mine/status.json"
    try:
        until(status.exists)
    finally:
        terminal.close()
    assert terminal.command.wait(SECONDS) == 129
    assert json.loads(status.read_text())["state"] == "interrupted"


def test_run_of_a_killed_command_is_followed_and_stopped(start: Start, run: Run, tmp_path: Path) -> None:
    process = start("run", *MINE, "wait")
    read_until(process, "begins")
    process.kill()
    process.communicate(timeout=SECONDS)
    follower, second = start("logs", "--follow", "mine"), start("run", *MINE, "wait")
    read_until(follower, "begins")
    line = "run mine is already active as job mine, with the flags of its first command: its log from the start\n"
    assert read_until(second, "begins") == f"{line}begins\n"
    assert "1 running, 0 queued" in run("status")[1]
    assert [(row["name"], row["state"]) for row in json.loads(run("runs", "--json")[1])] == [("mine", "training")]
    assert run("rm", "mine")[0] == 2
    stopped = f"run mine is stopped; {AGAIN.replace('command', 'ray-on-ecs run')}"
    assert run("stop", "mine") == (0, "", f"{stopped}\n")
    for command in (follower, second):
        assert command.wait(SECONDS) == 130
    assert run("stop", "mine")[0] == 2
    assert run("stop", "--all") == (0, "", f"there is not a run under way in {tmp_path}/code/results\n")
    assert run("rm", "mine") == (0, "", "run mine is deleted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_end_of_a_second_command_leaves_the_run(start: Start, run: Run, tmp_path: Path, number: signal.Signals) -> None:
    assert run("run", "--detach", *MINE, "wait")[0] == 0
    second = start("run", *MINE, "wait")
    read_until(second, "begins")
    second.send_signal(number)
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 128 + number
    assert "Ctrl-C ends this command alone; ray-on-ecs stop --local mine stops the run\n" in err
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == (
            "ray-on-ecs: run mine continues as job mine: ray-on-ecs logs --local --follow mine shows its log, "
            "ray-on-ecs stop --local mine stops it"
        )
    assert not have_ended(drivers(tmp_path))
    assert run("stop", "mine")[0] == 0


def test_detached_run_goes_on(run: Run, tmp_path: Path) -> None:
    status, out, err = run("run", "--detach", *MINE, "wait")
    assert status == 0, err
    shows = "ray-on-ecs logs --local --follow mine shows its log"
    assert err.splitlines()[-1] == f"{shows}, ray-on-ecs stop --local mine stops it"
    until(lambda: run("logs", "mine")[1] == "begins\n")
    status, out, err = run("run", "--detach", *MINE, "wait")
    line = "run mine is already active as job mine, with the flags of its first command: nothing is submitted\n"
    assert (status, out) == (0, line), err
    status, _, err = run("stop", "--all")
    assert (status, err) == (0, f"stopping run mine\nall runs in {tmp_path}/code/results are stopped\n")
    status, out, _ = run("run", "--detach", "--json", *MINE, "0")
    assert (status, json.loads(out)["job"]) == (0, "mine.2")


def test_run_of_another_folder_goes_on(run: Run, tmp_path: Path) -> None:
    elsewhere = ("--storage-path", str(tmp_path / "elsewhere"))
    assert run("run", "--detach", *elsewhere, *MINE, "wait")[0] == 0
    assert run("run", *MINE, "0")[0] == 0
    assert run("stop", "mine")[0] == 2
    assert f"1 running, 0 queued; 1 of them in {tmp_path}/elsewhere\n" in run("status")[1]
    assert run("stop", "--all")[2].splitlines()[-1] == (
        f"not stopped: 1 run in {tmp_path}/elsewhere; RAY_ON_ECS_STORAGE_PATH={tmp_path}/elsewhere "
        "ray-on-ecs stop --local mine stops it"
    )
    assert not have_ended(drivers(tmp_path))
