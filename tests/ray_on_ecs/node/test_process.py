"""A node exits as the engine that stops its container expects."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_SECONDS

# The code under test, wherever it is installed as well.
CODE = {"PYTHONPATH": os.pathsep.join(sys.path)}
ENVIRONMENT = {**CODE, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}
NODE = """
import signal
from ray_on_ecs.node import process

process.run_node("ray-x", lambda: process.ray_start(["--flag"], before_stop=lambda: signal.SIGTERM))
"""
WAITING = """
import time
from ray_on_ecs.node import process

def wait():
    print("waits", flush=True)
    time.sleep(60)

process.run_node("ray-x", wait)
"""
# Like `ray start --block`: SIGTERM drains, and ends it with 1.
RAY = """#!/bin/sh
trap 'echo drained; exit {status}' TERM
echo "ray $*"
while :; do sleep 0.1; done
"""


def fake_ray(folder: Path, script: str) -> dict[str, str]:
    """Return an environment in which `ray` is this script."""
    ray = folder / "ray"
    ray.write_text(script)
    ray.chmod(0o755)
    return {**os.environ, **ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}


def start(program: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[str, str, str]:
    """Stop a node once it has printed a line; return that line, the rest of its output, and its errors."""
    assert process.stdout
    first = process.stdout.readline()
    process.send_signal(number)
    return first, *process.communicate(timeout=LIMIT_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stop_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    process = start(NODE, fake_ray(tmp_path, RAY.format(status=1)))
    first, output, _ = stop(process, number)
    assert first.startswith("ray start --flag"), "Ray runs before it is stopped"
    assert process.returncode == 0
    assert "drained" in output


@pytest.mark.parametrize(("end", "status"), [("exit 7", 7), ("kill -9 $$", 128 + 9)], ids=["a status", "a signal"])
def test_a_node_that_fails_has_rays_exit_status(tmp_path: Path, end: str, status: int) -> None:
    process = start(NODE, fake_ray(tmp_path, f"#!/bin/sh\n{end}\n"))
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == status


def test_a_failure_while_it_stops_is_a_failure(tmp_path: Path) -> None:
    process = start(NODE, fake_ray(tmp_path, RAY.format(status=9)))
    stop(process)
    assert process.returncode == 9


def test_a_node_can_be_stopped_while_it_waits() -> None:
    process = start(WAITING, {**os.environ, **ENVIRONMENT})
    stop(process)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "environment",
    [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN": "secret"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ""}],
)
def test_no_node_starts_without_a_token(environment: dict[str, str]) -> None:
    process = start(NODE, {"PATH": os.environ["PATH"], **CODE, **environment})
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2
    assert errors.startswith("ray-x: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be set")
    assert "Traceback" not in errors


def test_invalid_token_is_not_printed() -> None:
    process = start(NODE, {"PATH": os.environ["PATH"], **CODE, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret\n"})
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2
    assert "RAY_AUTH_TOKEN must be printable" in errors
    assert "s3cret" not in errors


def test_failed_before_stop_still_drains(tmp_path: Path) -> None:
    program = NODE.replace("lambda: signal.SIGTERM", "lambda: 1 / 0")
    process = start(program, fake_ray(tmp_path, RAY.format(status=1)))
    _, output, errors = stop(process)
    assert process.returncode == 0
    assert "drained" in output
    assert "ZeroDivisionError" in errors
