"""Time from the command to the first line of a script, and from a crash to the next one: by Ray and by torchrun.

A run on a cluster is compared on a head that is up, and `run --local`, which needs none, with torchrun.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness import Bench, BenchmarkError
from bench.report import Comparison, at_most, spread
from tests.local_cluster import DIRECT, LocalCluster

REPEATS = 3

# Writes the time of its first line and of its end. With an argument, the first attempt of rank 0 crashes instead.
SCRIPT = """
import os, signal, sys, time
print("first line at", time.time(), flush=True)
if len(sys.argv) > 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    time.sleep(1)
    if os.environ["RANK"] == "0":
        print("crash at", time.time(), flush=True)
        raise RuntimeError("crash")
    time.sleep(600)
time.sleep(1)
print("last line at", time.time(), flush=True)
"""
# The same under Ray Train.
RAY_TRAIN = """
import time
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

def train():
    print("first line at", time.time(), flush=True)

DataParallelTrainer(
    train, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path="STORAGE")
).fit()
"""
RAY, TORCHRUN, RUNNER, LOCAL = "ray.train", "torch.distributed.run", "ray_on_ecs.run", "ray-on-ecs run --local"
EMPTY = "Ray Train with an empty function"
FIRST_LINE = "from the command to a script's first line"
SCRIPT_NOTE = "two workers, a cluster that is up, or none; the ratio is that of the best. Neither imports torch"


def measure(bench: Bench) -> list[Comparison]:
    """Run a script of a few lines by Ray Train, by torchrun and by the runner, in turns."""
    first: dict[str, list[float]] = {RAY: [], TORCHRUN: [], RUNNER: [], LOCAL: []}
    end: dict[str, list[float]] = {TORCHRUN: [], RUNNER: [], LOCAL: []}
    restart: dict[str, list[float]] = {TORCHRUN: [], RUNNER: [], LOCAL: []}
    with tempfile.TemporaryDirectory() as name, LocalCluster(2) as cluster:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "ray_train.py").write_text(RAY_TRAIN.replace("STORAGE", str(folder / "ray")))
        of_run = ("--num-workers", "2", "--max-restarts", "1", "--storage-path", str(folder / "runs"))
        programs = {
            TORCHRUN: ("-m", TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"),
            RUNNER: (DIRECT, *of_run),
            LOCAL: ("-m", "ray_on_ecs", "run", "--local", *of_run),
        }
        for repeat in range(REPEATS):
            bench.log(f"a script of a few lines: {repeat + 1} of {REPEATS}")
            alone = _Times([sys.executable, "ray_train.py"], cluster.environment, folder)
            first[RAY].append(alone.first - alone.started)
            for launcher, program in programs.items():
                command = [sys.executable, *program, "script.py"]
                times = _Times(command, cluster.environment, folder)
                first[launcher].append(times.first - times.started)
                end[launcher].append(times.ended - times.last)
                crashed = _Times([*command, "crash"], cluster.environment, folder)
                restart[launcher].append(crashed.restarted - crashed.crashed)
    by_ray = _compare(FIRST_LINE, SCRIPT_NOTE, (EMPTY, first[RAY]), (RUNNER, first[RUNNER]), limit=1.2)
    ended, raises = "the run's results are in its folder then", "rank 0 raises, its peer ends on SIGTERM"
    return [
        by_ray,
        *(
            _compare(name, note, (TORCHRUN, seconds[TORCHRUN]), (launcher, seconds[launcher]))
            for launcher in (RUNNER, LOCAL)
            for name, note, seconds in (
                (FIRST_LINE, SCRIPT_NOTE, first),
                ("from a script's end to the command's", ended, end),
                ("from a crash to the next first line", raises, restart),
            )
        ),
    ]


class _Times:
    """Run a command that writes its times, in seconds since 1970, to its output.

    Attributes:
        started: The time of the command.
        ended: The time of the command's end.
        first, last, crashed, restarted: The time of the script's first and last line, of its crash, and of its first
            line after it; 0 where it had none.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.started = time.time()
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        self.ended = time.time()
        output = done.stdout + done.stderr
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}:\n{output[-3000:]}")
        first_lines = _times(output, "first line")
        self.first = min(first_lines)
        self.last = max(_times(output, "last line"), default=0.0)
        self.crashed = max(_times(output, "crash"), default=0.0)
        self.restarted = min((moment for moment in first_lines if moment > self.crashed), default=0.0)


def _times(output: str, event: str) -> list[float]:
    return [float(moment) for moment in re.findall(rf"{event} at ([\d.]+)", output)]


def _compare(
    name: str,
    note: str,
    reference: tuple[str, Sequence[float]],
    ours: tuple[str, Sequence[float]],
    limit: float | None = None,
) -> Comparison:
    """Compare the best of two launchers' times, in seconds; `limit` is the target of the ratio."""
    ratio = min(ours[1]) / min(reference[1])
    return Comparison(
        name=name,
        reference=f"{reference[0]}: {spread(reference[1])} s",
        ours=f"{ours[0]}: {spread(ours[1])} s",
        ratio=ratio,
        target=None if limit is None else at_most(ratio, limit),
        n=len(ours[1]),
        note=note,
        data={reference[0]: list(reference[1]), ours[0]: list(ours[1])},
    )
