"""What watching the steps costs, as a share of the training it watches."""

from __future__ import annotations

import time

import torch

from bench.report import Finding, at_most
from bench.runs import Bench, Run
from training.engine.step_timer import StepTimer
from training.recipes.images.recipe import IMAGES
from training.run.tensorboard import event_file

STEPS = 20_000
TARGET = 0.01


def measure(bench: Bench, run: Run) -> list[Finding]:
    """The watch alone, as often as it is asked in a step and an epoch, beside the steps and epochs of a training."""
    bench.say("watching: the watch alone")
    return [finding(*alone(), _event_seconds(run), run)]


def finding(step: float, summary: float, events: float, run: Run) -> Finding:
    """What it costs an epoch: `step` seconds in each of its steps, and `summary` and `events` at its end."""
    epoch = run.history[-1]
    cost = epoch["steps"] * step + summary + events
    return Finding(
        name="watching",
        reference=f"an epoch: {epoch['train_seconds']:.1f} s",
        ours=f"{1e6 * step:.1f} us a step, {1e3 * (summary + events):.0f} ms an epoch",
        **at_most(cost / epoch["train_seconds"], TARGET),
        n=STEPS,
        note="the ratio is its share of an epoch of the trainings above; on GPUs a moment is an event in the stream",
        data={"step_seconds": step, "summary_seconds": summary, "event_file_seconds": events},
    )


def alone() -> tuple[float, float]:
    """Seconds that a step of two workers takes the watch, and the summary of STEPS of them."""
    timer = StepTimer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    batches = iter(range(STEPS))
    bare = time.perf_counter()
    for _ in range(STEPS):
        pass
    began = time.perf_counter()
    for _ in timer.timed_batches(batches):
        timer.gradients_ready()
        timer.gradients_ready()
        timer.allreduce_finished()
        timer.end_step()
    watched = time.perf_counter()
    timer.summary()
    return (watched - began - (began - bare)) / STEPS, time.perf_counter() - watched


def _event_seconds(run: Run) -> float:
    """Of the second of two event files: the first one's import happens once."""
    event_file(run.history, IMAGES)
    began = time.perf_counter()
    event_file(run.history, IMAGES)
    return time.perf_counter() - began
