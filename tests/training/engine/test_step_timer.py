from collections.abc import Iterator

import pytest
import torch

from training.engine import step_timer
from training.engine.step_timer import StepTimer

CPU = torch.device("cpu")


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    return clock


def slow(clock: Clock, n: int, seconds: float) -> Iterator[int]:
    for each in range(n):
        clock.sleep(seconds)
        yield each


def test_time_until_a_batch_is_there_is_the_data_s(clock: Clock) -> None:
    watched = StepTimer(CPU)
    for _ in watched.timed_batches(slow(clock, 4, 3)):
        clock.sleep(1)
        watched.end_step()
    summary = watched.summary()
    assert summary["data_wait_fraction"] == pytest.approx(0.75)
    assert summary["exposed_comm_fraction"] == 0, "nobody sent anything"
    assert summary["step_seconds_median"] == pytest.approx(4), "a step includes its wait for data"


def test_time_after_the_last_gradient_was_ready_is_the_network_s(clock: Clock) -> None:
    watched = StepTimer(CPU)
    for _ in watched.timed_batches(range(3)):
        watched.gradients_ready()
        clock.sleep(1)  # more of the backward pass, while the first bucket is under way
        watched.gradients_ready()
        clock.sleep(3)
        watched.allreduce_finished()
        watched.end_step()
    assert watched.summary()["exposed_comm_fraction"] == pytest.approx(0.75)


def test_median_and_95th_percentile_are_of_the_steps(clock: Clock) -> None:
    watched = StepTimer(CPU)
    for step in range(101):
        clock.sleep(step)
        watched.end_step()
    summary = watched.summary()
    assert (summary["step_seconds_median"], summary["step_seconds_p95"]) == pytest.approx((50, 95))


def test_an_epoch_begins_anew(clock: Clock) -> None:
    watched = StepTimer(CPU)
    for seconds in (9, 1):
        watched.start()
        for _ in watched.timed_batches(slow(clock, 2, seconds)):
            clock.sleep(1)
            watched.end_step()
    assert watched.summary()["data_wait_fraction"] == pytest.approx(0.5), "the epoch before is forgotten"


def test_there_is_no_gpu_memory_on_a_cpu(clock: Clock) -> None:
    watched = StepTimer(CPU)
    clock.sleep(1)
    watched.end_step()
    assert watched.summary()["gpu_memory_bytes"] is None
