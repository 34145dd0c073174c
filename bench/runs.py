"""What the benchmarks share: the images, the seeds, and whole trainings as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from bench import fashion
from training.recipes.images.dataset import Dataset

REPOSITORY = Path(__file__).parents[1]
# One thread each, and a Ray of their own whatever else runs here.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
LOCAL = ("--device", "cpu")


class BenchmarkError(Exception):
    """A training that a benchmark started has failed; the message has the end of what it said."""


@dataclass(frozen=True)
class Bench:
    """What every benchmark is given.

    Attributes:
        dataset: The images.
        folder: Where they lie as Fashion-MNIST's files; other folders may be made beside them.
        seeds: One training each.
        console: Where progress is told.
    """

    dataset: Dataset
    folder: Path
    seeds: tuple[int, ...]
    console: Console

    def say(self, line: str) -> None:
        """Tell what is being measured."""
        self.console.print(line, style="dim", highlight=False)


@dataclass(frozen=True)
class Run:
    """A finished training: when it was started, in seconds of the epoch, its metrics by epoch, and its result.json."""

    started: float
    history: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end, 0..1."""
        return self.history[-1]["test_accuracy"]


@contextmanager
def prepared(dataset: Dataset, seeds: tuple[int, ...], console: Console) -> Generator[Bench]:
    """The images that all benchmarks use, laid out in a folder for as long as they run."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fashion.write(dataset, Path(folder))
        yield Bench(dataset, Path(folder), seeds, console)


def train(bench: Bench, *flags: str, launcher: tuple[str, ...] = ("-m", "training")) -> Run:
    """Run the training command on the benchmark's images, or on what `flags` say, and read what it left."""
    name = f"run-{time.time_ns()}"
    runs = bench.folder / "runs"
    images = () if "--dataset" in flags else ("--data-dir", str(bench.folder))
    arguments = [*LOCAL, *images, "--storage-path", str(runs), "--run-name", name]
    started = time.time()
    call([sys.executable, *launcher, *arguments, *flags])
    history = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    return Run(started, history, json.loads((runs / name / "result.json").read_text()))


def torchrun(workers: int) -> tuple[str, ...]:
    """A launcher for `train`: the same loop without Ray."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), "-m", "training.plain")


def on_two_workers(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments)` returns on rank 0 of two gloo workers of one thread each, on this machine's CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, work, arguments), nprocs=2)
        return torch.load(f"{folder}/found")


def _worker(rank: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = work(*arguments)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def call(command: list[str]) -> str:
    """Run a command in the repository and return what it printed."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[1:4])} … ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
