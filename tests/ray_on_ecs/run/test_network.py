"""Process of the measurement: its environment, and why it failed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run import network
from ray_on_ecs.run.group import NetworkStatus
from ray_on_ecs.run.network import Part, probing
from tests.starts import start_of
from tests.waiting import until

INFO = "host:1:1 [0] NCCL INFO"
KILLED = "import os, signal; os.kill(os.getpid(), signal.{})"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(network, "PROBE", tmp_path / "probe.py")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "users.py").touch()
    (tmp_path / "beside.py").touch()
    return tmp_path


def measured(folder: Path, code: str, *output: str, **variables: str) -> NetworkStatus:
    """Return the status of a probe with this output and code, once it has ended."""
    network.PROBE.write_text("\n".join([*(f"print({line!r})" for line in output), code]))
    config = RunConfig(command=("train.py",), env=tuple(f"{name}={value}" for name, value in variables.items()))
    environment = replace(start_of(folder).environment, python=sys.executable, config=config)
    with probing(Part("127.0.0.1", 1, 0, 2, 0), environment, folder / "lock") as probe:
        return until(lambda: (status := probe.look(1.0)).has_ended and status)


@pytest.mark.parametrize(
    ("code", "output", "failure"),
    [
        ("raise SystemExit(3)", (f"{INFO} Channel 00",), "exit status 3"),
        (
            "raise SystemExit(1)",
            ("host:1:1 [0] NCCL WARN no room", f"{INFO} Channel 00"),
            "host:1:1 [0] NCCL WARN no room",
        ),
        ("raise RuntimeError('x')", (f"{INFO} Channel 00",), "RuntimeError: x"),
        (KILLED.format("SIGKILL"), (f"{INFO} Channel 00",), "signal 9 (Killed)"),
        (
            KILLED.format("SIGBUS"),
            (f"{INFO} Channel 00",),
            "signal 7 (Bus error): Fatal Python error: Bus error in <module>",
        ),
        (KILLED.format("SIGRTMIN"), (), "signal 34 ("),
    ],
)
def test_failure_has_the_reason(folder: Path, code: str, output: tuple[str, ...], failure: str) -> None:
    assert measured(folder, code, *output).failure.startswith(failure)


def test_result_of_the_probe_is_read(folder: Path) -> None:
    status = measured(folder, "", f"{INFO} Using network Socket", "seconds of an all-reduce: 2.5e-1")
    assert (status.seconds, status.failure, str(status.transport)) == (0.25, "", "NCCL uses sockets")


def test_probe_has_the_packages_of_the_script(folder: Path) -> None:
    code = "import os, users; assert os.environ['NCCL_ALGO'] == 'Ring'"
    assert measured(folder, code, PYTHONPATH="modules", NCCL_ALGO="Tree").failure == ""
    assert "No module named 'beside'" in measured(folder, "import beside").failure
