"""Time to the final accuracy of the reference, ray_train_ddp.py: both by Ray Train on two CPUs, a thread for each."""

from __future__ import annotations

import math
import re
import statistics
import sys
from typing import Any

from bench import harness
from bench.harness import Bench, Run
from bench.report import Comparison, Target, at_least, spread

TARGET = 3
# Fewer epochs than the default: these images are blends of a few, so a network learns them sooner.
FLAGS = ("--num-workers", "2", "--epochs", "3")
REFERENCE = "training/ray_train_ddp.py"
REFERENCE_FLAGS = ("--num-workers", "2", "--no-use-gpu", "--epochs", "10")
# The line that it prints after each epoch.
EPOCH = re.compile(r"epoch \d+, .*accuracy ([\d.e-]+), seconds ([\d.e+]+)")


def measure(bench: Bench) -> tuple[list[Comparison], list[Run]]:
    """Train the reference and ours in turns, once per seed; also return our runs, which other benchmarks use."""
    references, ours = [], []
    for seed in bench.seeds:
        bench.log(f"time to accuracy: the reference, seed {seed} of {len(bench.seeds)} (ten epochs)")
        references.append(_train_reference(bench, seed))
        bench.log(f"time to accuracy: ours, seed {seed}")
        ours.append(harness.train(bench, *FLAGS, "--seed", str(seed)))
    return [compare(references, [run.history for run in ours])], ours


def compare(references: list[list[dict[str, Any]]], ours: list[list[dict[str, Any]]]) -> Comparison:
    """Compare trainings of several seeds, each a list of epochs.

    The goal is the mean of the references' final accuracies. The reference's time is that of all its epochs, ours that
    of the epochs until the first one that reaches the goal, tests included. If one of ours never reaches the goal, the
    target is missed.
    """
    goal = statistics.mean(_final_accuracies(references))
    reference_seconds = [sum(epoch["seconds"] for epoch in epochs) for epochs in references]
    reaching = [seconds for epochs in ours if (seconds := _seconds_to_goal(epochs, goal)) is not None]
    median = statistics.median(reaching) if reaching else math.inf
    ratio = statistics.median(reference_seconds) / median
    target = at_least(ratio, TARGET)
    if len(reaching) < len(ours):
        target = Target(target.text, reached=False)
    first_epochs = ", ".join(str(_first_epoch(epochs, goal) or "none") for epochs in references)
    return Comparison(
        name="time to the reference's accuracy",
        reference=f"{spread(reference_seconds)} s, {len(references[0])} epochs",
        ours=f"{spread(reaching)} s" if reaching else "never",
        ratio=ratio,
        target=target,
        n=len(ours),
        note=f"{goal:.4f}, reached by {len(reaching)} of {len(ours)} of ours, which end at "
        f"{_list(_final_accuracies(ours))}; the reference ends at {_list(_final_accuracies(references))} and first "
        f"reaches it in epoch {first_epochs}; stopped there, it would make the ratio "
        f"{_reference_seconds_to_goal(references, goal) / median:.2g}",
        data={"goal": goal, "reference": references, "ours": ours},
    )


def _first_epoch(epochs: list[dict[str, Any]], goal: float) -> int | None:
    """Return the first epoch that reaches the goal, counted from 1."""
    return next((number for number, epoch in enumerate(epochs, 1) if epoch["test_accuracy"] >= goal), None)


def _reference_seconds_to_goal(references: list[list[dict[str, Any]]], goal: float) -> float:
    """Return the reference's median seconds if it stopped when it first reaches the goal, or else at its end."""
    stopped = [epochs[: _first_epoch(epochs, goal)] for epochs in references]
    return statistics.median(sum(epoch["seconds"] for epoch in epochs) for epochs in stopped)


def _final_accuracies(trainings: list[list[dict[str, Any]]]) -> list[float]:
    return [epochs[-1]["test_accuracy"] for epochs in trainings]


def _seconds_to_goal(epochs: list[dict[str, Any]], goal: float) -> float | None:
    """Return the seconds until the end of our first epoch that reaches the goal."""
    if (last := _first_epoch(epochs, goal)) is None:
        return None
    return sum(epoch["train_seconds"] + epoch["test_seconds"] for epoch in epochs[:last])


def _train_reference(bench: Bench, seed: int) -> list[dict[str, Any]]:
    folders = [str(bench.folder / "reference"), "--data-dir", str(bench.folder)]
    return read_epochs(harness.call([sys.executable, REFERENCE, *folders, *REFERENCE_FLAGS, "--seed", str(seed)]))


def read_epochs(printed: str) -> list[dict[str, Any]]:
    """Return the seconds and the test accuracy of each epoch from what the reference has printed."""
    return [{"seconds": float(each[2]), "test_accuracy": float(each[1])} for each in EPOCH.finditer(printed)]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
