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

from training.recipes.images import datasets
from training.recipes.images.augment import Augmentation
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split

TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 2_000
LEAST_SHARE = 0.6
NOISE = 12.0
FARTHEST_SHIFT = 2


def make(folder: Path | None, seed: int = 0, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Dataset:
    """The set that this seed makes of a folder's four IDX files, or of the download; UsageError without either."""
    config = ImageConfig(data_dir=str(folder) if folder else None)
    source = datasets.load(datasets.resolve_dataset(config), config)
    generator = torch.Generator().manual_seed(seed)
    splits = [multiply(part, number, generator) for part, number in ((source.train, train), (source.test, test))]
    return replace(Dataset.from_splits("fashion-mnist", *splits, classes=source.classes), name=f"fashion-{train}")


def multiply(source: Split, number: int, generator: torch.Generator) -> Split:
    """`number` images, as many of each class, in a random order."""
    classes = source.labels.unique()
    labels = classes[torch.arange(number) % len(classes)][torch.randperm(number, generator=generator)]
    first, second = (_draw(source.labels, labels, generator) for _ in range(2))
    share = LEAST_SHARE + (1 - LEAST_SHARE) * torch.rand(number, 1, 1, 1, generator=generator)
    images = share * source.images[first] + (1 - share) * source.images[second]
    images = Augmentation.draw(number, True, FARTHEST_SHIFT, generator).apply(images)
    images += NOISE * torch.randn(images.shape, generator=generator)
    return Split(images.round_().clamp_(0, 255).to(torch.uint8), labels)


def _draw(pool: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each label the index of an image of that class."""
    indices = torch.empty_like(labels)
    for label in labels.unique():
        members, wanted = (pool == label).nonzero().flatten(), labels == label
        indices[wanted] = members[torch.randint(len(members), (int(wanted.sum()),), generator=generator)]
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
