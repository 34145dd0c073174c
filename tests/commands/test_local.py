"""`ray-on-ecs run --local`: scripts without Ray, and Ray programs with a Ray that ends with the last one."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.commands.head import SECONDS, commands, read_until, scripts
from tests.commands.terminal import Terminal
from tests.local_cluster import have_ended
from tests.waiting import until

# Prints what it sees and writes TensorBoard events; with an argument it runs until it is stopped.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
Path("tb").mkdir(exist_ok=True)
events = open(f"tb/events.out.tfevents.{os.environ['RANK']}.host", "ab", buffering=0)
events.write(b"a step")
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "by", sys.executable, flush=True)
print("images in", os.environ.get("INPUT_images"), "and large.tar is a link:", os.path.islink("large.tar"))
print("step 100 | loss 2.31" if os.environ["RANK"] == "0" else "step 900 | loss 9.31")
while sys.argv[1:]:
    time.sleep(0.1)
"""
# A Ray program that waits for a file, and then asks the cluster.
PROGRAM = """
import os, sys, time
import ray
ray.init()
print("joined", os.environ["RAY_ADDRESS"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
print("a task has answered", ray.get(ray.remote(lambda: 42).remote()))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def laptop(environment: dict[str, str], home: Path, tmp_path: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in a folder with a script and with a separate home."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (code / "program.py").write_text(PROGRAM)
    with commands("ray_on_ecs", {**environment, "HOME": str(home)}, code) as start:
        yield start
    for each in ray_of(home):
        each.kill()


def ray_of(home: Path) -> list[psutil.Process]:
    """The processes of the head that a home's file names."""
    for file in (home / ".ray-on-ecs").glob("head-*.json"):
        first = psutil.Process(json.loads(file.read_text())["pid"])
        return [first, *first.children(recursive=True)]
    return []


@pytest.mark.smoke
def test_script_needs_no_ray(laptop: Start, home: Path, tmp_path: Path) -> None:
    (tmp_path / "code" / "images").mkdir()
    (tmp_path / "code" / "images" / "0.png").touch()
    with (tmp_path / "code" / "large.tar").open("wb") as file:
        file.truncate(2**31)
    process = laptop("run", "--local", "--input", "images=images", "--run-name", "first", "train.py")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    assert "Ray" not in err
    assert not ray_of(home)
    for rank in (0, 1):
        assert f"rank {rank} of 2 by {sys.executable}" in out
    assert f"images in {tmp_path}/code/images and large.tar is a link: True" in out
    result = json.loads((tmp_path / "code" / "results" / "first" / "result.json").read_text())
    assert result["command"] == ["train.py"]
    status = json.loads((tmp_path / "code" / "results" / "first" / "status.json").read_text())
    assert (status["step"], status["loss"]) == (100, 2.31)
    assert result["metrics"] is None


@pytest.mark.smoke
def test_stacks_of_a_run_that_goes_on_are_shown(laptop: Start, tmp_path: Path) -> None:
    def end(*words: str) -> tuple[str, str]:
        process = laptop(*words)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, out + err
        return out, err

    log = tmp_path / "code" / "results" / "first" / "status.json"
    end("run", "--local", "--detach", "--run-name", "first", "train.py", "wait")
    until(lambda: log.exists() and end("logs", "--local", "first")[0].count("large.tar") == 2)
    out, err = end("debug", "--local", "first")
    number = SCRIPT.splitlines().index("    time.sleep(0.1)") + 1
    assert out.splitlines()[0] in (
        f"all 2 ranks are in train.py:{number}",
        "the stacks of all 2 ranks can't be read (this node does not allow ptrace, which py-spy needs)",
    ), out + err
    assert len(list((tmp_path / "code" / "results" / "first" / "stalls").glob("*/rank_*.txt"))) == 2
    assert end("stop", "--local", "first")[1].startswith("run first is stopped")


@pytest.mark.ray
def test_ray_ends_with_the_last_ray_program(laptop: Start, home: Path, tmp_path: Path) -> None:
    def run(name: str, waits_for: Path) -> subprocess.Popen[str]:
        return laptop("run", "--local", "--driver", "--run-name", name, "program.py", str(waits_for))

    go = tmp_path / "go"
    first = run("first", go)
    read_until(first, "joined 127.0.0.1:")
    ray = ray_of(home)
    assert ray
    second = run("second", tmp_path)
    out, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, out + err
    assert "a task has answered 42" in out
    assert "starting Ray" not in err
    shown = laptop("dashboard", "--local", "--no-browser")
    read_until(shown, "dashboard  http://127.0.0.1:")
    assert not have_ended(ray[:1])
    go.touch()
    out, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, out + err
    assert "a task has answered 42" in out
    assert "starting Ray on this machine" in err.splitlines()
    until(lambda: have_ended(ray))
    until(lambda: not list((home / ".ray-on-ecs").glob("*.json")))


@pytest.mark.fault
def test_second_ctrl_c_ends_the_run_at_once(laptop: Start, tmp_path: Path) -> None:
    def state() -> str:
        file = tmp_path / "code" / "results" / "cut" / "status.json"
        return json.loads(file.read_text())["state"] if file.exists() else ""

    process = laptop("run", "--local", "--num-workers", "1", "--run-name", "cut", "train.py", "stubborn")
    read_until(process, "rank 0 of 1")
    until(lambda: state() == "training")
    script = scripts("train.py", tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr
    while "stopping run cut, " not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, out + err
    assert err.splitlines()[-1].startswith("ray-on-ecs: run cut was killed; ")
    assert script
    assert have_ended(script), "before the prompt is back"
    assert state() == "training", "after its grace period it would be interrupted"


@pytest.mark.fault
def test_closed_terminal_stops_the_run(environment: dict[str, str], laptop: Start, home: Path, tmp_path: Path) -> None:
    code, variables = tmp_path / "code", {**environment, "HOME": str(home)}
    typed = ("run", "--local", "--num-workers", "1", "--run-name", "closed", "train.py", "on")
    status = code / "results" / "closed" / "status.json"
    terminal = Terminal([sys.executable, "-m", "ray_on_ecs", *typed], variables, code)
    try:
        until(lambda: status.exists() and json.loads(status.read_text())["state"] == "training")
        until(lambda: scripts("train.py", code))
    finally:
        terminal.close()
    assert terminal.command.wait(SECONDS) == 129
    assert not scripts("train.py", code)
    assert json.loads(status.read_text())["state"] == "interrupted"


def test_runs_wait_for_earlier_runs(laptop: Start, tmp_path: Path) -> None:
    def run(name: str, workers: int, *words: str) -> subprocess.Popen[str]:
        return laptop("run", "--local", "--num-workers", str(workers), "--run-name", name, "train.py", *words)

    def status(name: str) -> tuple[str | None, str | None]:
        file = tmp_path / "code" / "results" / name / "status.json"
        document: dict[str, str | None] = json.loads(file.read_text()) if file.exists() else {}
        return document.get("state"), document.get("behind")

    first = run("first", 2, "on")
    read_until(first, "rank 0 of 2")
    second = run("second", 1)
    until(lambda: status("second") == ("queued", "first"))
    third = run("third", 1)
    until(lambda: status("third") == ("queued", "second"))

    listed = laptop("runs", "--local", "--json")
    runs = {run["name"]: run for run in json.loads(listed.communicate(timeout=SECONDS)[0])}
    assert (runs["second"]["state"], runs["second"]["behind"]) == ("queued", "first")
    shown = laptop("status", "--local").communicate(timeout=SECONDS)[0]
    assert "1 running, 2 queued" in shown

    third.send_signal(signal.SIGINT)
    assert third.wait(SECONDS) == 130
    assert status("third")[0] == "interrupted"
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 130
    assert "ray-on-ecs: run first is stopped; nothing is stored yet, " in err  # events are not a checkpoint
    assert status("first")[0] == "interrupted"
    out, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, out + err
    assert "ray-on-ecs: queued behind first (" in out
    assert status("second")[0] == "finished"


def test_detached_run_goes_on_until_it_is_stopped(laptop: Start, tmp_path: Path) -> None:
    def typed(*words: str) -> tuple[int, str, str]:
        process = laptop(*words)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, err

    flags = ("--local", "--num-workers", "1")
    status, _, err = typed("run", *flags, "--detach", "--run-name", "left", "train.py", "on")
    assert status == 0, err
    shows = "ray-on-ecs logs --local --follow left shows its log"
    assert err.splitlines()[-1] == f"{shows}, ray-on-ecs stop --local left stops it"
    until(lambda: "rank 0 of 1" in typed("logs", "--local", "left")[1])
    [listed] = json.loads(typed("runs", "--local", "--json")[1])
    assert (listed["name"], listed["state"]) == ("left", "training")

    status, out, err = typed("run", *flags, "--detach", "--run-name", "left", "train.py", "on")
    line = "run left is already active as job left, with the flags of its first command: nothing is submitted\n"
    assert (status, out) == (0, line), err
    events = tmp_path / "code" / "runs" / "left" / "files" / "tb" / "events.out.tfevents.0.host"
    until(lambda: typed("fetch", "--local", "left")[0] == 0 and events.exists())
    assert events.read_bytes() == b"a step"

    status, _, err = typed("stop", "--local", "left")
    assert status == 0, err
    assert "run left is stopped" in err
    assert not scripts("train.py", tmp_path)
    assert typed("stop", "--local", "left")[0] == 2
    status, _, err = typed("stop", "--local", "--all")
    assert (status, err) == (0, f"there is not a run under way in {tmp_path}/code/results\n")
