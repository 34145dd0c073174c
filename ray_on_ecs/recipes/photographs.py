"""Folders of photographs, which loader processes decode and crop."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from ray_on_ecs.recipes.image_batches import Images, MicroBatches, sample_of
from ray_on_ecs.recipes.options import fail
from ray_on_ecs.recipes.ranks import Ranks, usable_cpus

# Mean and standard deviation of the colors of photographs, those of ImageNet: what torchvision's weights expect.
COLORS = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
MAX_LOADERS = 16  # processes of a rank


class ImageFolders(Images):
    """Photographs of train/CLASS/... and test/CLASS/..., any number of them.

    Loader processes decode and crop them: a training image at random (RandomResizedCrop), a test image in the middle.
    Each image is decoded by one rank per epoch.

    Raises:
        ValueError: A folder is missing, or the classes differ.
        OSError: A class has not an image, or a folder can't be read.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not all((folder / name).is_dir() for name in ("train", "test")):
            raise ValueError("it has neither FashionMNIST/raw/ nor train/CLASS/... and test/CLASS/...")
        train, test = (ImageFolder(str(folder / name)) for name in ("train", "test"))
        for name, other, part in (("train", "test", train), ("test", "train", test)):
            lacking = sorted(set(part.classes) - set((test if part is train else train).classes))
            if lacking:
                raise ValueError(f"{name} has the class {lacking[0]!r}, which {other} lacks")
        self.name, self.class_names = folder.name, train.classes
        self.shape = (3, size, size)
        self.mean, self.std = (list(values) for values in COLORS)
        self._samples, self._test_samples = train.samples, test.samples
        self._loaders: dict[str, DataLoader[Any]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def limit(self, count: int) -> None:
        self._samples = [self._samples[index] for index in sample_of(len(self), count).tolist()]

    def train_batches(
        self, micro_batches: MicroBatches, device: torch.device, *, seed: int, flip: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        crop = [v2.RandomResizedCrop(self.shape[1], scale=(0.25, 1.0)), *([v2.RandomHorizontalFlip()] if flip else [])]
        yield from self._batches("train", _Photographs(self._samples, crop, seed), micro_batches, device)

    def test_batches(self, size: int, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
        mine = range(ranks.rank, len(self._test_samples), ranks.world_size)
        batches = [(0, list(mine[start : start + size])) for start in range(0, len(mine), size)]
        crop = [v2.Resize(self.shape[1] * 8 // 7), v2.CenterCrop(self.shape[1])]  # as torchvision's weights are tested
        yield from self._batches("test", _Photographs(self._test_samples, crop, 0), batches, ranks.device)

    def _batches(
        self, part: str, photographs: _Photographs, batches: Any, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if part not in self._loaders:  # its processes stay for all epochs
            self._loaders[part] = DataLoader(
                photographs,
                batch_sampler=batches,
                num_workers=loader_processes(),
                persistent_workers=True,
                pin_memory=device.type == "cuda",
                generator=torch.Generator(),  # or a loader's start would draw from the random numbers of dropout
            )
        normalize = self._normalizer(device)
        try:
            for images, labels in self._loaders[part]:
                yield normalize(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)
        except BrokenImage as cause:  # with the traceback of a loader process before it
            fail(str(cause).strip().rpartition("BrokenImage: ")[2])


class BrokenImage(ValueError):
    """A file is not an image, or only a part of one."""


class _Photographs(Dataset[Any]):
    """Photographs by batches of (epoch, indices); an image's augmentation depends on seed, epoch and index."""

    def __init__(self, samples: list[tuple[str, int]], crop: list[Any], seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._prepare = v2.Compose([*crop, v2.PILToTensor()])

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[tuple[Tensor, int]]:
        epoch, indices = batch
        with torch.random.fork_rng(devices=[]):
            return [self._read(epoch, index) for index in indices]

    def _read(self, epoch: int, index: int) -> tuple[Tensor, int]:
        path, label = self._samples[index]
        try:
            with Image.open(path) as image:
                pixels = image.convert("RGB")
        except Exception as cause:  # decoders raise errors of many kinds
            if isinstance(cause, OSError) and cause.errno:
                raise  # the disk's, which may be better at the next start
            raise BrokenImage(f"{path!r} is not an image that can be read ({cause}); mend or delete it") from None
        torch.default_generator.manual_seed(zlib.crc32(f"{self._seed} {epoch} {index}".encode()))
        return self._prepare(pixels), label


def loader_processes() -> int:
    """Return the loader processes of a rank: its share of the usable CPUs, but for the one that it computes on."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_LOADERS, usable_cpus() // local_ranks - 1))
