"""A Fashion-MNIST of any size, made from whatever folder of it is there: the data of the benchmarks.

Each image is a blend of two of its class, shifted, perhaps mirrored, and with noise: harder than its sources, and as
many as are wanted. Training images come from the training part alone and test images from the test part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training import data
from training.config import TrainingConfig
from training.data import Dataset, Split

TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 2_000
LEAST_SHARE = 0.6
FARTHEST_SHIFT = 2
NOISE = 12.0


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
    images = _shift(_flip(images, random), random)
    images += NOISE * torch.randn(images.shape, generator=random)
    return Split(images.round_().clamp_(0, 255).to(torch.uint8), labels)


def _draw(pool: Tensor, labels: Tensor, random: torch.Generator) -> Tensor:
    """For each label the index of an image of that class."""
    indices = torch.empty_like(labels)
    for label in labels.unique():
        members, wanted = (pool == label).nonzero().flatten(), labels == label
        indices[wanted] = members[torch.randint(len(members), (int(wanted.sum()),), generator=random)]
    return indices


def _flip(images: Tensor, random: torch.Generator) -> Tensor:
    mirrored = torch.rand(len(images), 1, 1, 1, generator=random) < 0.5
    return torch.where(mirrored, images.flip(-1), images)


def _shift(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image moved by up to FARTHEST_SHIFT pixels either way; what comes in is black."""
    side, margin = images.shape[-1], FARTHEST_SHIFT
    padded = torch.nn.functional.pad(images, [margin] * 4)
    corner = torch.randint(2 * margin + 1, (2, len(images), 1), generator=random) + torch.arange(side)
    rows, columns = corner[0][:, :, None], corner[1][:, None, :]
    return padded[torch.arange(len(images))[:, None, None], 0, rows, columns].unsqueeze(1)
