"""Gain from CPU workers when preparing images takes longer than training on them: training/preprocess.py.

The training node and the CPU worker have one core each. Ray Data prepares the images on one or the other.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys

import psutil

from bench.harness import Bench, BenchmarkError
from bench.report import Comparison, at_least, spread
from tests.local_cluster import REPOSITORY, LocalCluster

SCRIPT = REPOSITORY / "training" / "preprocess.py"
# The first epoch starts processes, and does not count.
FLAGS = [
    "--records=1536",
    "--size=64",
    "--blurs=60",
    "--epochs=3",
    "--batch-size=32",
    "--num-workers=1",
    "--no-use-gpu",
]
REPEATS = 2
TARGET = 1.2
LOG_CHARACTERS = 2000


def measure(bench: Bench) -> list[Comparison]:
    """Train without a CPU worker and with one, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkError("the training and the CPU worker need a core each, and there is one")
    alone: list[float] = []
    helped: list[float] = []
    for repeat in range(REPEATS):
        bench.log(f"preprocess: {repeat + 1} of {REPEATS}")
        for flag, speeds in (("--no-cpu-workers", alone), ("--cpu-workers", helped)):
            speeds.append(_train(bench, f"preprocess{flag}-{repeat}", cores, flag))
    return [compare(alone, helped)]


def compare(alone: list[float], helped: list[float]) -> Comparison:
    """Compare images per second, each a run's median."""
    ratio = statistics.median(helped) / statistics.median(alone)
    return Comparison(
        name="training/preprocess.py with a CPU worker",
        reference=f"without: {spread(alone)} images/s",
        ours=f"with: {spread(helped)} images/s",
        ratio=ratio,
        target=at_least(ratio, TARGET),
        n=len(alone),
        note="1,536 images of 64 x 64, each blurred 60 times, and resnet18; a Ray node with one core trains, another "
        "one prepares or is not there; the epochs of a run after its first",
        data={"without": alone, "with": helped},
    )


def read_speeds(printed: str) -> list[float]:
    """Return the images per second of each epoch, from what the program prints."""
    return [float(speed) for speed in re.findall(r"epoch \d+: .* images, ([\d.]+) a second", printed)]


def _train(bench: Bench, name: str, cores: list[int], flag: str) -> float:
    """Return the median of a run's images per second; each node has a core for itself."""
    with LocalCluster(0) as cluster:
        # As on a node with a GPU, the training takes a CPU and leaves one to prepare images; here they share a core.
        nodes = [cluster.add_worker(cpus=2), *([cluster.add_cpu_worker()] if flag == "--cpu-workers" else [])]
        for node, core in zip(nodes, cores, strict=False):
            for process in (psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)):
                process.cpu_affinity([core])
        command = [sys.executable, str(SCRIPT), f"{bench.folder}/runs", "--name", name, *FLAGS, flag]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    speeds = read_speeds(done.stdout + done.stderr)[1:]
    if done.returncode or not speeds:
        raise BenchmarkError(f"the training ended with {done.returncode}: {done.stderr[-LOG_CHARACTERS:]}")
    return statistics.median(speeds)
