"""Benchmark images: any number of them, synthesized from Fashion-MNIST or a subset of it.

An image is a blend of two images of a class, shifted, perhaps flipped, with noise. It is harder to classify than its
sources. Training images are blends of training images, and test images of test images.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST

from ray_on_ecs.recipes.images import CACHE, FILES

TRAIN_IMAGES, TEST_IMAGES = 12_000, 2_000
MIN_WEIGHT = 0.6
NOISE_STD = 12.0
MAX_SHIFT = 2


def write(source: Path | None, root: Path, train: int = TRAIN_IMAGES, test: int = TEST_IMAGES) -> None:
    """Write FashionMNIST/raw in a folder.

    Args:
        source: A folder with Fashion-MNIST's four files, gzipped or not; None downloads them.
        root: The folder.
        train: The number of training images.
        test: The number of test images.
    """
    if source is None:
        FashionMNIST(str(CACHE), download=True)
        source = CACHE / "FashionMNIST" / "raw"
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("t10k", test)):
        files = [name for name in FILES if name.startswith(part)]
        made = blend(*(read(source, name) for name in files), count, generator)
        for name, values in zip(files, made, strict=True):
            header = struct.pack(f">I{values.dim()}I", 0x0800 + values.dim(), *values.shape)
            (raw / name).write_bytes(header + values.numpy().tobytes())


def read(folder: Path, name: str) -> Tensor:
    """Read a file of the IDX format, uint8, gzipped or not."""
    file = folder / f"{name}.gz"
    content = gzip.decompress(file.read_bytes()) if file.is_file() else (folder / name).read_bytes()
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    return torch.frombuffer(bytearray(content[4 + 4 * len(shape) :]), dtype=torch.uint8).reshape(shape)


def blend(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make images [count, 28, 28] and their labels, as many of each class."""
    classes = labels.unique()
    targets = classes[torch.arange(count) % len(classes)][torch.randperm(count, generator=generator)]
    first, second = (_draw(labels, targets, generator) for _ in range(2))
    weight = MIN_WEIGHT + (1 - MIN_WEIGHT) * torch.rand(count, 1, 1, generator=generator)
    made = weight * images[first] + (1 - weight) * images[second]
    flips = torch.rand(count, generator=generator) < 0.5
    made[flips] = made[flips].flip(-1)
    side = 2 * MAX_SHIFT + 1
    moves = torch.randint(side * side, (count,), generator=generator)
    for move in range(side * side):
        shift = (move // side - MAX_SHIFT, move % side - MAX_SHIFT)
        made[moves == move] = made[moves == move].roll(shift, (1, 2))
    made += NOISE_STD * torch.randn(made.shape, generator=generator)
    return made.round_().clamp_(0, 255).to(torch.uint8), targets


def _draw(labels: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Return the index of a random image of its class for each target."""
    drawn = torch.empty(len(targets), dtype=torch.int64)
    for label in targets.unique():
        members = (labels == label).nonzero().flatten()
        mask = targets == label
        drawn[mask] = members[torch.randint(len(members), (int(mask.sum()),), generator=generator)]
    return drawn
