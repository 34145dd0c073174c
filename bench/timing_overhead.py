"""What the step timer and the event file cost, as a fraction of the training."""

from __future__ import annotations

import time

import torch

from bench.harness import Bench, Run
from bench.report import Comparison, at_most
from training.engine.step_timer import StepTimer
from training.recipes.images.recipe import IMAGES
from training.tensorboard import event_file

STEPS = 20_000
TARGET = 0.01


def measure(bench: Bench, run: Run) -> list[Comparison]:
    """Time the step timer and the event file by themselves, and compare them with an epoch of a training."""
    bench.log("timing overhead: the step timer alone")
    return [compare(*time_step_timer(), _time_event_file(run), run)]


def compare(step: float, summary: float, event_file: float, run: Run) -> Comparison:
    """Compare the cost with the run's last epoch.

    Args:
        step: Seconds that the timer takes in each step.
        summary: Seconds that its summary takes at the end of an epoch.
        event_file: Seconds that the event file takes at the end of an epoch.
        run: The training.
    """
    epoch = run.history[-1]
    fraction = (epoch["steps"] * step + summary + event_file) / epoch["train_seconds"]
    return Comparison(
        name="timing overhead",
        reference=f"an epoch: {epoch['train_seconds']:.1f} s",
        ours=f"{1e6 * step:.1f} us per step, {1e3 * (summary + event_file):.0f} ms per epoch",
        ratio=fraction,
        target=at_most(fraction, TARGET),
        n=STEPS,
        note="the ratio is the fraction of an epoch of the trainings above; on GPUs the timer records CUDA events",
        data={"step_seconds": step, "summary_seconds": summary, "event_file_seconds": event_file},
    )


def time_step_timer() -> tuple[float, float]:
    """Return the seconds that the timer takes per step of two workers, and for the summary of STEPS steps."""
    timer = StepTimer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    batches = iter(range(STEPS))
    loop_started = time.perf_counter()
    for _ in range(STEPS):
        pass
    timed_loop_started = time.perf_counter()
    for _ in timer.timed_batches(batches):
        timer.gradients_ready()
        timer.gradients_ready()
        timer.allreduce_finished()
        timer.end_step()
    timed_loop_ended = time.perf_counter()
    timer.summary()
    summary = time.perf_counter() - timed_loop_ended
    empty_loop = timed_loop_started - loop_started
    return (timed_loop_ended - timed_loop_started - empty_loop) / STEPS, summary


def _time_event_file(run: Run) -> float:
    """Time the second of two event files: the first one imports its library."""
    event_file(run.history, IMAGES)
    started = time.perf_counter()
    event_file(run.history, IMAGES)
    return time.perf_counter() - started
