"""The driver's view of a run, from what the actor says; tests/faults has an actor that is killed."""

import pickle
from typing import Any, cast

import pytest
from ray_on_ecs.tracking.run_actor import Progress, RunActor, RunClient, RunState

from ray_on_ecs.tracking.run_monitor import RunMonitor


@pytest.fixture
def monitor() -> RunMonitor:
    return RunMonitor(cast("RunClient", None))


def state(steps: int, *finished: int, workers: str = "a", actor: str = "first") -> RunState:
    metrics: dict[int, Any] = {each: {"epoch": each} for each in finished}
    return RunState(actor, Progress(workers, steps), metrics)


def test_steps_are_those_of_this_command(monitor: RunMonitor) -> None:
    monitor.update(state(4))
    monitor.update(state(4))
    monitor.update(state(9))
    assert monitor.steps_made == 9


def test_repeated_steps_count_twice(monitor: RunMonitor) -> None:
    for steps, workers in ((8, "a"), (3, "b"), (4, "b")):
        monitor.update(state(steps, workers=workers))
    assert monitor.steps_made == 8 + 4


def test_an_actor_that_was_restarted_costs_a_line(monitor: RunMonitor, capsys: pytest.CaptureFixture[str]) -> None:
    monitor.update(state(5, 0))
    monitor.update(RunState("second", None, {}))
    monitor.update(state(12, 1, actor="second"))
    assert capsys.readouterr().out.count("the actor of the run was lost and restarted; training continues") == 1
    assert [each["epoch"] for each in monitor.history] == [0, 1]
    assert monitor.steps_made == 12


class LocalClient(RunClient):
    """Calls the actor's methods in this process, and counts the bytes that Ray would send."""

    def __init__(self) -> None:
        self.actor = RunActor()
        self.sent: list[int] = []

    def read(self, after: int) -> RunState:
        state = self.actor.read(after)
        self.sent.append(len(pickle.dumps(state)))
        return state


def test_metrics_that_a_step_adds_later_are_kept() -> None:
    client = LocalClient()
    monitor = RunMonitor(client)
    for number, metrics in ((0, {"loss": 2}), (0, {"loss": 2, "val": 3}), (0, {"loss": 2, "val": 3}), (1, {"loss": 1})):
        client.actor.report_metrics(number, metrics)
        monitor.poll()
    assert monitor.history == [{"loss": 2, "val": 3}, {"loss": 1}]
    assert monitor.metrics == {"loss": 1, "val": 3}


def test_poll_sends_only_new_metrics() -> None:
    client = LocalClient()
    monitor = RunMonitor(client)
    for epoch in range(5000):
        client.actor.report_metrics(epoch, {"epoch": epoch, "train_loss": epoch / 7, "test_loss": epoch / 11})
        monitor.poll()
    assert [each["epoch"] for each in monitor.history] == list(range(5000))
    assert max(client.sent) < 2 * client.sent[0]
