"""The input alone: samples a second of a DataLoader with per-sample transforms, and of the batches that training takes.

usage: python -m bench.input [--data-dir FOLDER]   (with Fashion-MNIST's four IDX files; it is downloaded otherwise)

Both read the same images on one CPU thread, in turns, for as many epochs as --repeats; the ratio is of the medians. The
results go to bench/results/input.json as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
import torchvision
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor

from bench import fashion
from training import data
from training.data import Dataset, Split
from training.errors import UsageError

RESULTS = Path(__file__).parent / "results" / "input.json"
BATCH_SIZE = 128
REFERENCE, OURS = "DataLoader, each sample transformed", "uint8 in memory, batches normalized"
# At least so many samples a second for each one of the reference's.
TARGET = 50


class PerSample(torch.utils.data.Dataset):
    """As torchvision's FashionMNIST hands out samples: an image of PIL's, through the transforms, one by one."""

    def __init__(self, split: Split, mean: float, std: float) -> None:
        self._split = split
        self._transform = Compose([ToTensor(), Normalize((mean,), (std,))])

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self._split.images[index, 0].numpy())
        return self._transform(image), int(self._split.labels[index])


def per_sample(dataset: Dataset, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The reference's batches of an epoch."""
    random = torch.Generator().manual_seed(epoch)
    yield from DataLoader(
        PerSample(dataset.train, dataset.mean, dataset.std), batch_size=BATCH_SIZE, shuffle=True, generator=random
    )


def in_batches(dataset: Dataset, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that training/loop.py makes of an epoch."""
    for indices in data.train_batches(dataset.train, BATCH_SIZE, epoch, rank=0, world_size=1, seed=0):
        yield dataset.normalize(dataset.train.images[indices]), dataset.train.labels[indices]


def measure(dataset: Dataset, repeats: int) -> dict[str, list[float]]:
    """Samples a second of each input, once a repeat, in turns, after one epoch of each that does not count."""
    inputs: dict[str, Callable[..., Iterator[tuple[Tensor, Tensor]]]] = {REFERENCE: per_sample, OURS: in_batches}
    found: dict[str, list[float]] = {name: [] for name in inputs}
    for repeat in track(range(repeats + 1), "reading", console=Console(stderr=True), transient=True):
        for name, batches in inputs.items():
            began = time.perf_counter()
            samples = sum(len(labels) for _, labels in batches(dataset, repeat))
            if repeat:
                found[name].append(samples / (time.perf_counter() - began))
    return found


def document(found: dict[str, list[float]], dataset: Dataset) -> dict[str, Any]:
    """The results with all that they depend on."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return {
        "benchmark": "input",
        "samples_per_second": found,
        "medians": medians,
        "ratio": medians[OURS] / medians[REFERENCE],
        "target": TARGET,
        "data": {"name": dataset.name, "samples": len(dataset.train), "batch_size": BATCH_SIZE, "seed": 0},
        "hardware": {"machine": platform.machine(), "cpus": psutil.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
        },
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(result: dict[str, Any]) -> Table:
    """The results as people read them."""
    shown = Table(title=f"Input alone: {result['data']['samples']:,} images, one CPU thread, batches of {BATCH_SIZE}")
    for name in ("input", "samples a second", "n", "ratio"):
        shown.add_column(name, justify="left" if name == "input" else "right")
    for name, rates in result["samples_per_second"].items():
        ratio = result["medians"][name] / result["medians"][REFERENCE]
        shown.add_row(name, f"{result['medians'][name]:,.0f}", str(len(rates)), f"{ratio:.1f}")
    return shown


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.input", description="Samples a second of the input alone.")
    parser.add_argument(
        "--data-dir", type=Path, help="folder with Fashion-MNIST's four IDX files (default: a download)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each input (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        dataset = fashion.make(arguments.data_dir)
    except UsageError as error:
        reason = str(error) if arguments.data_dir else "Fashion-MNIST can't be downloaded; give --data-dir FOLDER"
        print(f"bench: {reason}", file=sys.stderr)
        return error.exit_status
    result = document(measure(dataset, arguments.repeats), dataset)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    console.print(table(result))
    console.print(f"{result['ratio']:.0f} times the reference's; at least {TARGET} are wanted. Written to {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
