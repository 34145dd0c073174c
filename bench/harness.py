"""Shared by the benchmarks: a folder, the seeds, and commands started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

REPOSITORY = Path(__file__).parents[1]
# One thread per process, and a separate Ray cluster.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}


class BenchmarkError(Exception):
    """A training that a benchmark started has failed; the message ends with the end of its output."""


@dataclass(frozen=True)
class Bench:
    """The input of every benchmark.

    Attributes:
        data_dir: A folder with Fashion-MNIST's files; None downloads them.
        folder: A temporary one.
        seeds: The seeds; each training is run once per seed.
        console: Shows the progress.
    """

    data_dir: Path | None
    folder: Path
    seeds: tuple[int, ...]
    console: Console

    def log(self, line: str) -> None:
        """Print what is being measured."""
        self.console.print(line, style="dim", highlight=False)


@contextmanager
def prepared(data_dir: Path | None, seeds: tuple[int, ...], console: Console) -> Generator[Bench]:
    """Yield the benchmarks' input."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Bench(data_dir, Path(folder), seeds, console)


def on_two_workers(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work(*arguments)` on two gloo workers of one thread each, and return rank 0's value."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, work, arguments), nprocs=2)
        return torch.load(f"{folder}/value")


def _worker(rank: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    value = work(*arguments)
    if rank == 0:
        torch.save(value, f"{folder}/value")
    dist.destroy_process_group()


def python_path() -> str:
    """Return PYTHONPATH with the repository in front."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def call(command: list[str]) -> str:
    """Run a command in the repository and return its output; BenchmarkError if it fails."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[1:4])} … ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
