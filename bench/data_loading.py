"""The input alone: samples a second of a DataLoader with per-sample transforms, and of the batches of training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor

from bench.harness import Bench
from bench.report import Comparison, at_least, spread
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.loader import BatchLoader

BATCH_SIZE = 128
REPEATS = 5
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
    generator = torch.Generator().manual_seed(epoch)
    yield from DataLoader(
        PerSample(dataset.train, dataset.mean, dataset.std), batch_size=BATCH_SIZE, shuffle=True, generator=generator
    )


def in_batches(dataset: Dataset, epoch: int, horizontal_flip: str = "off") -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that training takes of an epoch."""
    config = ImageConfig(batch_size=BATCH_SIZE, horizontal_flip=horizontal_flip)
    for microbatches in BatchLoader(dataset, config, 0, 1, torch.device("cpu")).train(epoch):
        yield from microbatches


def measure(bench: Bench) -> list[Comparison]:
    """Each input on one thread, in turns, for some epochs after one that does not count."""
    bench.log("input: a DataLoader beside batches")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inputs = {"per_sample": per_sample, "in_batches": in_batches, "flipped": partial(in_batches, horizontal_flip="on")}
    rates: dict[str, list[float]] = {name: [] for name in inputs}
    for repeat in range(REPEATS + 1):
        for name, batches in inputs.items():
            began = time.perf_counter()
            samples = sum(len(labels) for _, labels in batches(bench.dataset, repeat))
            if repeat:
                rates[name].append(samples / (time.perf_counter() - began))
    torch.set_num_threads(threads)
    return [
        compare("input alone", rates["per_sample"], rates["in_batches"], "as the reference's: normalized, shuffled"),
        compare("input alone, flipped", rates["per_sample"], rates["flipped"], "as training takes them by default"),
    ]


def compare(name: str, reference: list[float], ours: list[float], note: str) -> Comparison:
    """Samples a second, by their medians."""
    ratio = statistics.median(ours) / statistics.median(reference)
    return Comparison(
        name=name,
        reference=f"{spread(reference)} images/s",
        ours=f"{spread(ours)} images/s",
        ratio=ratio,
        target=at_least(ratio, TARGET),
        n=len(ours),
        note=f"one CPU thread, batches of {BATCH_SIZE}; {note}",
        data={"reference": reference, "ours": ours},
    )
