"""A Fashion-MNIST of any size, made from whatever folder of it is there: the data of the benchmarks.

Each image is a blend of two of its class, shifted, perhaps mirrored, and with noise: harder than its sources, and as
many as are wanted. Training images come from the training part alone and test images from the test part.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training import data
from training.augment import Changes
from training.config import TrainingConfig
from training.data import Dataset, Split

TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 2_000
LEAST_SHARE = 0.6
NOISE = 12.0
FARTHEST_SHIFT = 2


def make(folder: Path | None, seed: int = 0, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Dataset:
    """The set that this seed makes of a folder's four IDX files, or of the download; UsageError without either."""
    config = TrainingConfig(data_dir=str(folder) if folder else None)
    source = data.load(data.choose(config), config)
    random = torch.Generator().manual_seed(seed)
    splits = [multiply(part, number, random) for part, number in ((source.train, train), (source.test, test))]
    return replace(Dataset.of("fashion-mnist", *splits, classes=source.classes), name=f"fashion-{train}")


def multiply(source: Split, number: int, random: torch.Generator) -> Split:
    """`number` images, as many of each class, in a random order."""
    classes = source.labels.unique()
    labels = classes[torch.arange(number) % len(classes)][torch.randperm(number, generator=random)]
    first, second = (_draw(source.labels, labels, random) for _ in range(2))
    share = LEAST_SHARE + (1 - LEAST_SHARE) * torch.rand(number, 1, 1, 1, generator=random)
    images = share * source.images[first] + (1 - share) * source.images[second]
    images = Changes.draw(number, True, FARTHEST_SHIFT, random).apply(images)
    images += NOISE * torch.randn(images.shape, generator=random)
    return Split(images.round_().clamp_(0, 255).to(torch.uint8), labels)


def _draw(pool: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
    """For each label the index of an image of that class."""
    indices = torch.empty_like(labels)
    for label in labels.unique():
        members, wanted = (pool == label).nonzero().flatten(), labels == label
        indices[wanted] = members[torch.randint(len(members), (int(wanted.sum()),), generator=random)]
    return indices


def write(dataset: Dataset, folder: Path) -> None:
    """Lay the set out as torchvision's FashionMNIST has it: four IDX files in FashionMNIST/raw."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, split in (("train", dataset.train), ("t10k", dataset.test)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(split.images.squeeze(1)))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(split.labels.to(torch.uint8)))


def idx(values: Tensor) -> bytes:
    """The IDX format of MNIST: a magic number with the type (8 is uint8) and the rank, the sizes, the bytes."""
    return struct.pack(f">I{values.dim()}I", 0x0800 + values.dim(), *values.shape) + values.numpy().tobytes()
