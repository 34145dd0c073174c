"""What a CPU helper saves where preparing the images takes longer than training on them.

A worker's node has one core, and the helper another. Photos are decoded and cropped at random in each epoch, by threads
of the worker or by Ray Data on the helper; everything else is the same, and so are the losses.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from torch import nn

from bench.harness import Bench, BenchmarkError
from bench.report import Comparison, at_least, spread
from tests.local_cluster import LocalCluster

PHOTOS, DIFFERENT, TESTS = 1024, 64, 32
WIDTH, HEIGHT = 1280, 960
IMAGE_SIZE, BATCH_SIZE = 96, 32
# The first one of each run starts processes, and does not count.
EPOCHS = 4
REPEATS = 2
TARGET = 1.2
LOG_CHARACTERS = 2000


def model(channels: int, classes: int) -> nn.Module:
    """Build a network that computes for a shorter time than a core needs for the images."""
    layers: list[nn.Module] = []
    for before, after, kernel, stride in ((channels, 60, 7, 4), (60, 120, 3, 1), (120, 240, 3, 2)):
        layers += [nn.Conv2d(before, after, kernel, stride), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(240, classes))


def measure(bench: Bench) -> list[Comparison]:
    """Train without a helper and with one, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkError("the worker and the helper need a core each, and there is one")
    photos = bench.folder / "photos"
    _write(photos)
    alone, helped = [], []
    losses: set[str] = set()
    for repeat in range(REPEATS):
        bench.log(f"helpers: {repeat + 1} of {REPEATS}")
        for with_helper, times in ((False, alone), (True, helped)):
            history = _train(bench, photos, cores, with_helper=with_helper)
            times.append(statistics.median(each["train_seconds"] for each in history[1:]))
            losses.add(json.dumps([each["train_loss"] for each in history]))
    return [compare(alone, helped, len(losses) == 1)]


def compare(alone: list[float], helped: list[float], same_losses: bool) -> Comparison:
    """Compare the seconds of an epoch, each a run's median."""
    ratio = statistics.median(alone) / statistics.median(helped)
    said = "the losses are the same to the last digit" if same_losses else "THE LOSSES DIFFER"
    return Comparison(
        name="an epoch with a CPU helper",
        reference=f"without: {spread(alone)} s",
        ours=f"with: {spread(helped)} s",
        ratio=ratio,
        target=at_least(ratio, TARGET),
        n=len(alone),
        note=f"{PHOTOS} JPEGs of {WIDTH} x {HEIGHT}, a random part of each scaled to {IMAGE_SIZE} x {IMAGE_SIZE}, and "
        "a small network; a Ray node with one core trains, and another one helps or is idle; the epochs of a run after "
        f"its first; {said}",
        data={"without": alone, "with": helped},
    )


def _train(bench: Bench, photos: Path, cores: list[int], *, with_helper: bool) -> list[dict[str, Any]]:
    """Train on a cluster of one worker's node, each node on a core of its own; returns the metrics of the epochs."""
    runs, name = bench.folder / "runs", f"helpers-{with_helper}-{len(list(bench.folder.glob('runs/helpers-*')))}"
    flags = [
        *("--dataset", "folder", "--data-dir", str(photos), "--image-size", str(IMAGE_SIZE), "--random-crop", "on"),
        *("--model", "bench.helpers:model", "--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS)),
        *("--num-workers", "1", "--device", "cpu", "--storage-path", str(runs), "--run-name", name),
    ]
    with LocalCluster(1) as cluster:
        nodes = [cluster.workers[0], *([cluster.add_helper()] if with_helper else [])]
        for node, core in zip(nodes, cores, strict=False):
            for process in (psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)):
                process.cpu_affinity([core])
        command = [sys.executable, "-m", "training", *flags]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"the training ended with {done.returncode}: {done.stderr[-LOG_CHARACTERS:]}")
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def _write(folder: Path) -> None:
    """Write photos of two classes: waves of one color or another, with noise. Some contents have several names."""
    numbers = np.random.default_rng(0)
    across, down = np.meshgrid(np.linspace(0, 9, WIDTH), np.linspace(0, 7, HEIGHT))
    different: list[bytes] = []
    for number in range(DIFFERENT):
        waves = 100 + 60 * np.sin(across * numbers.uniform(0.5, 2) + down * numbers.uniform(-1, 1))
        photo = np.repeat(waves[:, :, None], 3, axis=2) + numbers.integers(-20, 20, (HEIGHT, WIDTH, 1))
        photo[:, :, 2 * (number % 2)] += 40
        content = io.BytesIO()
        Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(content, "JPEG", quality=90)
        different.append(content.getvalue())
    for part, count in (("train", PHOTOS), ("test", TESTS)):
        for number in range(count):
            path = folder / part / f"class-{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(different[number % DIFFERENT])
