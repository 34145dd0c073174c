"""Time to the reference's final accuracy, and images per second: image_classifier.py against ray_train_ddp.py.

Both train on two CPUs, a thread for each, under Ray.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench import harness, images
from bench.harness import Bench
from bench.report import Comparison, Target, at_least, spread

TARGET = 3
SPEED_TARGET = 1
# Fewer epochs than the default: the images are blends of a few, so a network learns them sooner.
FLAGS = ("--epochs", "3")
REFERENCE = "training/ray_train_ddp.py"
REFERENCE_FLAGS = ("--num-workers", "2", "--no-use-gpu", "--epochs", "10")
# As many images of a step as the reference has; the first epoch warms up.
SPEED_FLAGS = ("--epochs", "3", "--batch-size", "128")
# The lines of each epoch: of every worker, and of the first one.
TRAINED = re.compile(r"\[Epoch (\d+) .*Batchsize: (\d+) \| Steps: (\d+) \| Total epoch time: ([\d.e+]+)")
EPOCH = re.compile(r"epoch (\d+), .*accuracy ([\d.e-]+), seconds ([\d.e+]+)")
WORKERS = 2

Epochs = list[dict[str, Any]]


def measure(bench: Bench) -> list[Comparison]:
    """Train the reference and ours in turns, once per seed."""
    references, ours, speeds = [], [], []
    images.write(bench.data_dir, bench.folder)
    for seed in bench.seeds:
        bench.log(f"time to accuracy: the reference, seed {seed} of {len(bench.seeds)} (ten epochs)")
        references.append(_train_reference(bench, seed))
        bench.log(f"time to accuracy: ours, seed {seed}")
        ours.append(_train(bench, *FLAGS, "--seed", str(seed)))
        speeds.append(_train(bench, *SPEED_FLAGS, "--seed", str(seed)))
    return [compare(references, ours), compare_speed(references, speeds)]


def compare(references: list[Epochs], ours: list[Epochs]) -> Comparison:
    """Compare trainings of several seeds, each a list of epochs.

    The goal is the mean of the references' final accuracies. The reference's time is that of all its epochs, ours that
    of the epochs until the first one that reaches the goal, tests included. If one of ours never reaches the goal, the
    target is missed.
    """
    goal = statistics.mean(_final_accuracies(references))
    reference_seconds = [_seconds(epochs) for epochs in references]
    reaching: list[float] = []
    for epochs in ours:
        last = _first_epoch(epochs, goal)
        if last is not None:
            reaching.append(_seconds(epochs[:last]))
    median = statistics.median(reaching) if reaching else math.inf
    ratio = statistics.median(reference_seconds) / median
    target = at_least(ratio, TARGET)
    if len(reaching) < len(ours):
        target = Target(target.text, reached=False)
    first_epochs = ", ".join(str(_first_epoch(epochs, goal) or "none") for epochs in references)
    stopped = statistics.median(_seconds(epochs[: _first_epoch(epochs, goal)]) for epochs in references)
    return Comparison(
        name="time to the reference's accuracy",
        reference=f"{spread(reference_seconds)} s, {len(references[0])} epochs",
        ours=f"{spread(reaching)} s" if reaching else "never",
        ratio=ratio,
        target=target,
        n=len(ours),
        note=f"{goal:.4f}, reached by {len(reaching)} of {len(ours)} of ours, which end at "
        f"{_list(_final_accuracies(ours))}; the reference ends at {_list(_final_accuracies(references))} and first "
        f"reaches it in epoch {first_epochs}; stopped there, it would make the ratio {stopped / median:.2g}",
        data={"goal": goal, "reference": references, "ours": ours},
    )


def compare_speed(references: list[Epochs], ours: list[Epochs]) -> Comparison:
    """Compare images per second of training, each the median of a run's epochs after its first."""
    reference_speeds = [_speed(epochs[1:]) for epochs in references]
    our_speeds = [_speed(epochs[1:]) for epochs in ours]
    ratio = statistics.median(our_speeds) / statistics.median(reference_speeds)
    return Comparison(
        name="images per second",
        reference=f"{spread(reference_speeds)} images/s",
        ours=f"{spread(our_speeds)} images/s",
        ratio=ratio,
        target=at_least(ratio, SPEED_TARGET),
        n=len(ours),
        note="resnet18 in fp32, two workers with 128 images each; the time of the training alone",
        data={"reference": reference_speeds, "ours": our_speeds},
    )


def read_epochs(printed: str) -> Epochs:
    """Return seconds, test accuracy and images per second of each epoch from what the reference has printed."""
    slowest: dict[str, float] = {}  # images per second of both workers by epoch
    for epoch, size, steps, seconds in TRAINED.findall(printed):
        speed = WORKERS * int(size) * int(steps) / float(seconds)
        slowest[epoch] = min(speed, slowest.get(epoch, math.inf))
    return [
        {"seconds": float(seconds), "test_accuracy": float(accuracy), "samples_per_second": slowest[epoch]}
        for epoch, accuracy, seconds in EPOCH.findall(printed)
    ]


def _train_reference(bench: Bench, seed: int) -> Epochs:
    folders = [str(bench.folder / "reference"), "--data", str(bench.folder)]
    return read_epochs(harness.call([sys.executable, REFERENCE, *folders, *REFERENCE_FLAGS, "--seed", str(seed)]))


def _train(bench: Bench, *flags: str) -> Epochs:
    """Train the image classifier as a run, and return the metrics of its epochs."""
    name, runs = f"run-{time.time_ns()}", bench.folder / "runs"
    run = ["--num-workers", "2", "--storage-path", str(runs), "--run-name", name, "--working-dir", "training"]
    script = ["image_classifier.py", "--data", str(bench.folder), *flags]
    harness.call([sys.executable, "-P", "-m", "ray_on_ecs", "run", "--local", *run, *script])
    records = map(json.loads, Path(runs, name, "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "test_accuracy" in record]


def _seconds(epochs: Epochs) -> float:
    return sum(epoch["seconds"] for epoch in epochs)


def _speed(epochs: Epochs) -> float:
    return statistics.median(epoch["samples_per_second"] for epoch in epochs)


def _first_epoch(epochs: Epochs, goal: float) -> int | None:
    """Return the first epoch that reaches the goal, counted from 1."""
    return next((number for number, epoch in enumerate(epochs, 1) if epoch["test_accuracy"] >= goal), None)


def _final_accuracies(trainings: list[Epochs]) -> list[float]:
    return [epochs[-1]["test_accuracy"] for epochs in trainings]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
