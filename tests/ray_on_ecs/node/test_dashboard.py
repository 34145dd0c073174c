"""The dashboard is started again when it has ended or hangs; tests/commands/test_dashboard.py has a real one."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.node import Node

from ray_on_ecs.node import dashboard
from ray_on_ecs.node.dashboard import (
    ASK_SECONDS,
    HANG_SECONDS,
    PROCESS_TYPE_DASHBOARD,
    RETRY_SECONDS,
    START_SECONDS,
    Supervisor,
)
from tests.ray_on_ecs.node.conftest import Head

COMMAND_NAME = "ray-head"


def test_ray_has_what_the_supervisor_needs() -> None:
    from ray.scripts import scripts  # takes half a second

    assert scripts.start.callback
    assert "node.dead_processes()" in inspect.getsource(scripts.start.callback)
    assert "process_info.process.poll()" in inspect.getsource(Node.dead_processes)
    started = inspect.getsource(Node.start_api_server)
    assert "self.all_processes[ray_constants.PROCESS_TYPE_DASHBOARD] = " in started
    parameters = inspect.signature(Node.start_api_server).parameters
    assert list(parameters) == ["self", "include_dashboard", "raise_on_failure"]
    assert "port=self._ray_params.dashboard_port" in started
    assert callable(scripts.main)


class FakeNode:
    """A node with a raylet that has ended, whose dashboards are processes that sleep."""

    def __init__(self, port: int) -> None:
        self._ray_params = SimpleNamespace(dashboard_port=port)
        self.all_processes: dict[str, list[Any]] = {"raylet": [self._run("pass")]}
        self.all_processes["raylet"][0].process.wait()
        self.starts = 0
        self.failure: Exception | bool = False
        self.start_api_server()

    def start_api_server(self, **given: bool) -> None:
        self.starts += 1
        if isinstance(self.failure, Exception):
            raise self.failure
        if not self.failure:
            self.all_processes[PROCESS_TYPE_DASHBOARD] = [self._run("import time; time.sleep(600)")]

    @property
    def dashboard(self) -> subprocess.Popen[bytes]:
        [only] = self.all_processes[PROCESS_TYPE_DASHBOARD]
        return only.process

    def _run(self, code: str) -> Any:
        return SimpleNamespace(process=subprocess.Popen([sys.executable, "-c", code]))


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def node(head: Head) -> Iterator[Any]:
    node = FakeNode(head.server_port)
    yield node
    for each in node.all_processes.get(PROCESS_TYPE_DASHBOARD, []):
        each.process.kill()
        each.process.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(dashboard, "time", clock)
    return clock


def ended(supervisor: Supervisor, node: Any) -> list[str]:
    return [kind for kind, _ in supervisor.dead_processes(node)]


def test_a_dashboard_that_answers_is_left_alone(node: Any, clock: Clock) -> None:
    supervisor = Supervisor()
    for _ in range(30):
        clock.now += ASK_SECONDS
        assert ended(supervisor, node) == ["raylet"]
    assert node.starts == 1


def test_a_dashboard_that_has_ended_is_started_again(
    node: Any, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor()
    clock.now += RETRY_SECONDS
    for number in (2, 3):
        node.dashboard.kill()
        node.dashboard.wait()
        assert ended(supervisor, node) == ["raylet"]
        assert node.starts == number
        clock.now += RETRY_SECONDS
    assert capsys.readouterr().err == 2 * "ray-head: the dashboard has ended with -9; starting it again\n"


@pytest.mark.parametrize("failure", [True, OSError("No space left on device")], ids=["no process", "full disk"])
def test_failed_dashboard_start_is_repeated(node: Any, clock: Clock, failure: Exception | bool) -> None:
    supervisor = Supervisor()
    clock.now += RETRY_SECONDS
    node.dashboard.kill()
    node.dashboard.wait()
    node.failure = failure
    for _ in range(3 * int(RETRY_SECONDS)):
        supervisor.dead_processes(node)
        clock.now += 1
    assert node.starts == 4
    node.failure = False
    supervisor.dead_processes(node)
    assert node.dashboard.poll() is None


@pytest.mark.parametrize(("has_answered", "limit"), [(True, HANG_SECONDS), (False, START_SECONDS)])
def test_hanging_dashboard_is_restarted(node: Any, head: Head, clock: Clock, has_answered: bool, limit: float) -> None:
    supervisor, hung = Supervisor(), node.dashboard
    if has_answered:
        clock.now += ASK_SECONDS
        supervisor.dead_processes(node)
        clock.now += limit  # the whole container may have been frozen
    head.failing = True
    silent = -ASK_SECONDS if has_answered else 0.0
    while silent + ASK_SECONDS < limit:
        clock.now += ASK_SECONDS
        silent += ASK_SECONDS
        supervisor.dead_processes(node)
    assert (node.starts, hung.poll()) == (1, None)
    clock.now += ASK_SECONDS
    supervisor.dead_processes(node)
    assert (node.starts, hung.poll()) == (2, -9)
