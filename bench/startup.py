"""Time from the command to the first step of a training, and to the first line of a script: by Ray and by torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from bench import harness
from bench.harness import Bench, Run
from bench.report import Comparison, spread
from tests.local_cluster import LocalCluster

REPEATS = 3
# A first step that takes next to no time.
FLAGS = ("--dataset", "synthetic", "--samples", "64", "--batch-size", "8", "--epochs", "1")

SCRIPT = "import time; print('first line at', time.time())"
SCRIPT_NOTE = (
    "two workers on a cluster that is up; the ratio is that of the best. Ray starts seven processes, most in turns: "
    "the run's actor, Ray Train's controller and its helpers, the workers. Neither imports torch"
)
NOTE = (
    "two workers; the ratio is that of the best. A local Ray starts ten processes that import their packages, in three "
    "stages: driver, Ray Train's controller, workers. Done, from 43 s on two cores of 2.8 GHz: no torchvision in "
    "driver and controller, workers that Ray has already started, no runtime environment. Tried: imports in the "
    "workers while the controller starts, 5 s more; no dashboard, 3 to 5 s less, but Ray Train asks it for its state"
)


def measure(bench: Bench) -> list[Comparison]:
    """Start both in turns, with two workers each."""
    seconds: dict[str, list[float]] = {"torchrun": [], "ray": []}
    for repeat in range(REPEATS):
        bench.log(f"startup: {repeat + 1} of {REPEATS}")
        seconds["torchrun"].append(_until_first_step(harness.train(bench, *FLAGS, launcher=harness.torchrun(2))))
        seconds["ray"].append(_until_first_step(harness.train(bench, *FLAGS, "--num-workers", "2")))
    first_step = _compare("from the command to the first step", NOTE, seconds["torchrun"], "Ray Train", seconds["ray"])
    return [first_step, _first_lines(bench)]


def _first_lines(bench: Bench) -> Comparison:
    """Start a script of one line by both in turns."""
    torchrun, launch = [], []
    with tempfile.TemporaryDirectory() as folder, LocalCluster(2) as cluster:
        (Path(folder) / "first.py").write_text(SCRIPT)
        flags = ("--num-workers", "2", "--storage-path", str(Path(folder) / "runs"))
        for repeat in range(REPEATS):
            bench.log(f"a script's first line: {repeat + 1} of {REPEATS}")
            by_torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "first.py"]
            torchrun.append(_until_first_line(by_torchrun, cluster.environment, folder))
            launch.append(_until_first_line(["ray_on_ecs.run", *flags, "first.py"], cluster.environment, folder))
    return _compare("from the command to a script's first line", SCRIPT_NOTE, torchrun, "ray_on_ecs.run", launch)


def _compare(name: str, note: str, torchrun: list[float], launcher: str, seconds: list[float]) -> Comparison:
    """Compare a launcher's best start with torchrun's best, both in seconds."""
    return Comparison(
        name=name,
        reference=f"torchrun: {spread(torchrun)} s",
        ours=f"{launcher}: {spread(seconds)} s",
        ratio=min(seconds) / min(torchrun),
        n=len(seconds),
        note=note,
        data={"torchrun": torchrun, launcher: seconds},
    )


def _until_first_line(module: Sequence[str], environment: Mapping[str, str], folder: str) -> float:
    started_at = time.time()
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return min(map(float, re.findall(r"first line at ([\d.]+)", done.stdout))) - started_at


def _until_first_step(run: Run) -> float:
    return datetime.fromisoformat(run.result["times"]["first_step"]).timestamp() - run.started_at
