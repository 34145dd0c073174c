"""The driver's view of a run, from what rank 0 reports."""

import pytest

from ray_on_ecs.tracking.end import Record, Steps
from ray_on_ecs.tracking.run_monitor import RunMonitor


@pytest.fixture
def monitor() -> RunMonitor:
    return RunMonitor()


def test_steps_are_those_of_this_command(monitor: RunMonitor) -> None:
    for step in (None, 4, 4, 9):
        monitor.update(0, step)
    assert (monitor.step, monitor.steps_made) == (9, 9)


def test_repeated_steps_count_twice(monitor: RunMonitor) -> None:
    for start, step in ((0, 8), (1, None), (1, 3), (1, 4)):
        monitor.update(start, step)
    assert (monitor.step, monitor.steps_made) == (4, 8 + 4)


def test_metrics_that_a_step_adds_later_are_kept(monitor: RunMonitor) -> None:
    for number, metrics in ((0, {"loss": 2}), (0, {"loss": 2, "val": 3}), (0, {"loss": 2, "val": 3}), (1, {"loss": 1})):
        monitor.update(0, None, (number, metrics))
    assert monitor.history == [{"loss": 2, "val": 3}, {"loss": 1}]
    assert monitor.metrics == {"loss": 1, "val": 3}


def test_report_without_news_keeps_the_last(monitor: RunMonitor) -> None:
    monitor.update(0, 1, (0, {"loss": 2}), "https://tracker", {"step": 1, "loss": 2.0})
    monitor.update(0, 2)
    assert (monitor.url, monitor.guess, monitor.history) == (
        "https://tracker",
        {"step": 1, "loss": 2.0},
        [{"loss": 2}],
    )


def test_records_of_steps_are_those_of_one_start() -> None:
    now = iter((0.0, 10.0, 90.0, 95.0))
    monitor = RunMonitor(lambda: next(now))
    for start, step in ((0, 8), (0, 9), (1, 5), (1, 7)):
        monitor.update(start, step, steps=Steps(step, 20))
    assert (monitor.steps, monitor.records) == (Steps(7, 20), (Record(90.0, 5), Record(95.0, 7)))
    monitor.update(2, None)
    assert (monitor.steps, monitor.records) == (Steps(7, 20), ())
