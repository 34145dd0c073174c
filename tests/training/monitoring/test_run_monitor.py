"""The driver's view of a run, from what the actor says; tests/faults has an actor that is killed."""

from typing import Any, cast

import pytest
from rich.console import Console

from training.monitoring.run_monitor import RunMonitor
from training.monitoring.run_state import Progress, RunState, RunStateClient


@pytest.fixture
def monitor() -> RunMonitor:
    return RunMonitor(cast("RunStateClient", None), Console(width=100))


def at(
    epoch: int, step: int, *finished: int, incarnation: str = "first", first_step_at: float | None = 7.0
) -> RunState:
    metrics: list[Any] = [{"epoch": each} for each in finished]
    return RunState(incarnation, Progress(epoch, step, 10, first_step_at), metrics)


def test_steps_are_counted_from_where_the_workers_continue(monitor: RunMonitor) -> None:
    monitor.update(at(3, 2, first_step_at=None))
    assert monitor.steps_made == 0, "they were made by an earlier command"
    monitor.update(at(3, 6))
    monitor.update(at(4, 1))
    assert monitor.steps_made == 9


def test_steps_that_were_lost_and_made_again_count_twice(monitor: RunMonitor) -> None:
    for step in (0, 8, 5, 9):
        monitor.update(at(0, step, first_step_at=None))
    assert monitor.steps_made == 8 + 4, "it is progress to whoever stops what idles"


def test_the_first_step_is_that_of_the_first_workers(monitor: RunMonitor) -> None:
    monitor.update(at(0, 0, first_step_at=None))
    monitor.update(at(0, 1, first_step_at=5.0))
    monitor.update(at(0, 1, first_step_at=50.0))
    assert monitor.first_step_at == 5.0


def test_an_actor_that_was_restarted_costs_a_line(monitor: RunMonitor, capsys: pytest.CaptureFixture[str]) -> None:
    monitor.update(at(0, 5, 0))
    monitor.update(RunState("second", None, []))
    monitor.update(at(1, 2, 1, incarnation="second"))
    assert capsys.readouterr().out.count("the run-state actor was lost and restarted; training continues") == 1
    assert [each["epoch"] for each in monitor.history] == [0, 1]
    assert monitor.steps_made == 1 + 7, "what was known before stays"
