"""The benchmarks' data: a variant of Fashion-MNIST of any size, made from the original or from a part of it.

Each image is a blend of two images of the same class, translated, flipped or not, and with noise. It is harder to
classify than its sources. Training images are made from training images only, and test images from test images.
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
MIN_WEIGHT = 0.6
NOISE_STD = 12.0
MAX_SHIFT = 2


def make(folder: Path | None, seed: int = 0, train: int = TRAIN_SAMPLES, test: int = TEST_SAMPLES) -> Dataset:
    """Make the data set from a folder's four IDX files, or from a download.

    Raises:
        UsageError: There is neither.
    """
    config = ImageConfig(data_dir=str(folder) if folder else None)
    source = datasets.load(datasets.resolve_dataset(config), config)
    generator = torch.Generator().manual_seed(seed)
    splits = [multiply(split, n, generator) for split, n in ((source.train, train), (source.test, test))]
    return replace(Dataset.from_splits("fashion-mnist", *splits, classes=source.classes), name=f"fashion-{train}")


def multiply(source: Split, n: int, generator: torch.Generator) -> Split:
    """Make `n` images, the same number of each class, in random order."""
    classes = source.labels.unique()
    labels = classes[torch.arange(n) % len(classes)][torch.randperm(n, generator=generator)]
    first, second = (_draw(source.labels, labels, generator) for _ in range(2))
    weight = MIN_WEIGHT + (1 - MIN_WEIGHT) * torch.rand(n, 1, 1, 1, generator=generator)
    images = weight * source.images[first] + (1 - weight) * source.images[second]
    images = Augmentation.draw(n, True, MAX_SHIFT, generator).apply(images)
    images += NOISE_STD * torch.randn(images.shape, generator=generator)
    return Split(images.round_().clamp_(0, 255).to(torch.uint8), labels)


def _draw(source_labels: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw, for each label, the index of a source image of that class."""
    indices = torch.empty_like(labels)
    for label in labels.unique():
        members = (source_labels == label).nonzero().flatten()
        same_class = labels == label
        drawn = torch.randint(len(members), (int(same_class.sum()),), generator=generator)
        indices[same_class] = members[drawn]
    return indices


def write(dataset: Dataset, folder: Path) -> None:
    """Write the data set as torchvision's FashionMNIST expects it: four IDX files in FashionMNIST/raw."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, split in (("train", dataset.train), ("t10k", dataset.test)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(split.images.squeeze(1)))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(split.labels.to(torch.uint8)))


def idx(values: Tensor) -> bytes:
    """Encode in MNIST's IDX format: a magic number with the type (8 is uint8) and the rank, the sizes, the bytes."""
    return struct.pack(f">I{values.dim()}I", 0x0800 + values.dim(), *values.shape) + values.numpy().tobytes()
