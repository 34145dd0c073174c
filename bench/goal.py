"""Time to the reference's final test accuracy, both through Ray Train on two CPU workers of one thread each."""

from __future__ import annotations

import json
import math
import statistics
import sys
from typing import Any

from bench import runs
from bench.report import Finding, at_least, spread
from bench.runs import Bench, Run

TARGET = 3
# Fewer epochs than a user's default: these images are blends of few, so a network has seen them sooner.
OURS = ("--num-workers", "2", "--epochs", "3")


def measure(bench: Bench) -> tuple[list[Finding], list[Run]]:
    """One training of each a seed, in turns; also ours, which other benchmarks compare with."""
    references, ours = [], []
    for seed in bench.seeds:
        bench.say(f"goal: the reference, seed {seed} of {len(bench.seeds)} (ten epochs)")
        references.append(_reference(bench, seed))
        bench.say(f"goal: ours, seed {seed}")
        ours.append(runs.train(bench, *OURS, "--seed", str(seed)))
    return [finding(references, [run.history for run in ours])], ours


def finding(references: list[list[dict[str, Any]]], ours: list[list[dict[str, Any]]]) -> Finding:
    """The comparison of trainings of several seeds, each a list of epochs.

    The goal is the mean of the references' final accuracies. The reference's time is that of its ten epochs, ours that
    of the epochs until the goal is passed, tests included; a training that never passes it makes the finding a failure.
    """
    goal = statistics.mean(_finals(references))
    theirs = [sum(each["seconds"] for each in epochs) for epochs in references]
    passed = [_until(epochs, goal) for epochs in ours]
    reached = [seconds for seconds in passed if seconds is not None]
    epochs = ", ".join(str(_passing(each, goal) or "none") for each in references)
    median = statistics.median(reached) if reached else math.inf
    ratio = statistics.median(theirs) / median
    fields: dict[str, Any] = at_least(ratio, TARGET)
    fields["reached"] &= len(reached) == len(ours)
    return Finding(
        name="time to the reference's accuracy",
        reference=f"{spread(theirs)} s, {len(references[0])} epochs",
        ours=f"{spread(reached)} s" if reached else "never",
        **fields,
        n=len(ours),
        note=f"{goal:.4f}, passed by {len(reached)} of {len(ours)} of ours, ending at {_list(_finals(ours))}; the "
        f"reference ends at {_list(_finals(references))}; first passes it in epoch {epochs}; were "
        f"it stopped there, the ratio would be {_stopped(references, goal) / median:.2g}",
        data={"goal": goal, "reference": references, "ours": ours},
    )


def _passing(epochs: list[dict[str, Any]], goal: float) -> int | None:
    """The first epoch that passes the goal, counted from 1."""
    return next((number for number, each in enumerate(epochs, 1) if each["test_accuracy"] >= goal), None)


def _stopped(references: list[list[dict[str, Any]]], goal: float) -> float:
    """The reference's median seconds if it were stopped as soon as it passes the goal, or else at its end."""
    return statistics.median(sum(each["seconds"] for each in epochs[: _passing(epochs, goal)]) for epochs in references)


def _finals(trainings: list[list[dict[str, Any]]]) -> list[float]:
    return [epochs[-1]["test_accuracy"] for epochs in trainings]


def _until(epochs: list[dict[str, Any]], goal: float) -> float | None:
    """Seconds until the end of our first epoch that passes the goal."""
    if (end := _passing(epochs, goal)) is None:
        return None
    return sum(each["train_seconds"] + each["test_seconds"] for each in epochs[:end])


def _reference(bench: Bench, seed: int) -> list[dict[str, Any]]:
    folders = ["--data-dir", str(bench.folder), "--storage-path", str(bench.folder / "reference")]
    printed = runs.call([sys.executable, "-m", "bench.reference", *folders, "--seed", str(seed)])
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"epoch"')]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
