"""`ray-on-ecs --local` against a Ray head: the same verbs as on a stack."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.conftest import CLASSIFIER
from tests.commands.head import SECONDS, Head, commands, read_until
from tests.commands.test_job import CONNECTION
from tests.waiting import free_ports, until

TINY = ("--num-workers", "2", *CLASSIFIER, "--model", "own:build", "--epochs", "2")
LONG = ("--num-workers", "1", *CLASSIFIER, "--model", "own:held", "--epochs", "3")
LOCAL = "--local"


@pytest.fixture
def laptop(environment: dict[str, str], head: Head, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `ray-on-ecs` with these words, against the head of the tests."""
    own = {**environment, **head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard}
    with commands("ray_on_ecs", own, tmp_path) as start:
        yield start


def typed(
    laptop: Callable[..., subprocess.Popen[str]], *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Type a command and wait for its end."""
    process = laptop(*words, **variables)
    out, err = process.communicate(timeout=SECONDS)
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_run_is_trained_listed_and_fetched(laptop: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    done = typed(laptop, "run", LOCAL, "--run-name", "laptop", "--fetch", "here", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("run laptop is submitted as job laptop\n")
    assert "results in " in done.stdout
    fetched = tmp_path / "here" / "laptop"
    assert {"result.json", "curves.png", "model.safetensors", "report.html", "logs"} <= {
        each.name for each in fetched.iterdir()
    }
    listed = json.loads(typed(laptop, "runs", LOCAL, "--json").stdout)
    [run] = [each for each in listed if each["name"] == "laptop"]
    assert (run["state"], run["step"], run["workers"]) == ("finished", 16, 2)
    assert "results in " in typed(laptop, "logs", LOCAL, "laptop").stdout
    last = typed(laptop, "logs", LOCAL, "laptop", "--tail", "1").stdout
    assert last.startswith("results in ")
    assert last.count("\n") == 1
    refused = typed(laptop, "run", LOCAL, "--run-name", "laptop", *TINY)
    assert refused.returncode == 2
    assert "run 'laptop' is finished" in refused.stderr


# The command, with a shorter limit for a silent log.
IMPATIENT = """
import sys
import ray_on_ecs.cluster.head, ray_on_ecs.cli.follow
from ray_on_ecs.__main__ import main
ray_on_ecs.cli.follow.SILENT_SECONDS, ray_on_ecs.cluster.head.REQUEST_SECONDS = 2, 10
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.fault
def test_cut_or_silent_connection_is_restored(
    laptop: Callable[..., subprocess.Popen[str]], head: Head, hold: Path
) -> None:
    port, other = free_ports(2)
    with connected(head, port) as cut, connected(head, other) as asleep:
        followers = [laptop("run", LOCAL, "--run-name", "cut", *LONG, **at(port))]
        seen = [read_until(followers[0], "epoch 1/")]  # it waits after that
        followers.append(laptop("logs", LOCAL, "--follow", "cut", code=IMPATIENT, **at(other)))
        seen.append(read_until(followers[1], "epoch 1/"))
        cut.kill()
        cut.wait()
        asleep.send_signal(signal.SIGSTOP)  # as when a laptop sleeps: nothing is closed, and no data arrives
        for follower in followers:
            assert follower.stderr
            assert any("lost the connection" in line for line in follower.stderr)
        asleep.send_signal(signal.SIGCONT)
        with connected(head, port):
            hold.unlink()
            ended = [follower.communicate(timeout=SECONDS) for follower in followers]
    for follower, begun, (out, err) in zip(followers, seen, ended, strict=True):
        log = begun + out
        assert follower.returncode == 0, log + err
        assert [log.count(f"epoch {epoch}/") for epoch in (1, 2, 3)] == [1, 1, 1], log
        assert log.count("results in ") == 1


def at(port: int) -> dict[str, str]:
    return {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}


@contextmanager
def connected(head: Head, port: int) -> Generator[subprocess.Popen[str]]:
    """Forward a port to the head's dashboard, as a session does."""
    command = [sys.executable, "-c", CONNECTION, head.dashboard.rpartition(":")[2], str(port)]
    connection = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert connection.stdout
        assert connection.stdout.readline()
        yield connection
    finally:
        connection.kill()
        connection.communicate()


def test_detached_run_continues_until_it_is_stopped(laptop: Callable[..., subprocess.Popen[str]], hold: Path) -> None:
    started = typed(laptop, "run", LOCAL, "--detach", "--json", "--run-name", "left", *LONG)
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout)["job"] == "left"
    follower = laptop("logs", LOCAL, "--follow", "left")
    read_until(follower, "results")
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 130
    assert "run left continues as job left: ray-on-ecs logs --local --follow left shows its log" in err.splitlines()[-1]
    until(lambda: _state(laptop, "left") == "training", SECONDS)

    stopped = typed(laptop, "stop", LOCAL, "left")
    assert stopped.returncode == 0, stopped.stderr
    assert "run left is stopped" in stopped.stderr
    assert typed(laptop, "stop", LOCAL, "left").returncode == 2
    assert _state(laptop, "left") == "interrupted"


def test_impossible_commands_are_one_line_and_a_status(laptop: Callable[..., subprocess.Popen[str]]) -> None:
    [port] = free_ports(1)
    for words, variables, status, line in (
        (("run", LOCAL, "missing.py"), {}, 2, "SCRIPT: there is no file 'missing.py'"),
        (("run", LOCAL, "--lr", "1", "missing.py"), {}, 2, "--lr: is not a flag of ray-on-ecs run"),
        (("run", LOCAL, *TINY), {"RAY_AUTH_TOKEN": "another"}, 2, "the Ray head refuses the token"),
        (("stop", LOCAL, "absent"), {}, 2, "run absent is not under way"),
        (("logs", LOCAL, "absent"), {}, 2, "run 'absent' not found in"),
        (("stop", LOCAL, "any"), {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}, 3, "no Ray head answers"),
        (("stop", LOCAL, "--compose", "any"), {}, 2, "give one of them"),
    ):
        done = typed(laptop, *words, **variables)
        assert (done.returncode, done.stderr.count("\n")) == (status, 1), (words, done.stdout, done.stderr)
        assert done.stderr.startswith("ray-on-ecs: ")
        assert line in done.stderr


def _state(laptop: Callable[..., subprocess.Popen[str]], name: str) -> str | None:
    listed = json.loads(typed(laptop, "runs", LOCAL, "--json").stdout)
    return next((each["state"] for each in listed if each["name"] == name), None)
