"""Batches of images: micro-batches that are the same at any world size, and data sets that yield them.

Order and augmentation of an epoch depend only on the seed and the epoch, so a training sees the same micro-batches on
any number of ranks, and after a restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ray_on_ecs.checkpoint.sampler import EPOCH_STRIDE, DistributedSampler
from ray_on_ecs.recipes.ranks import Ranks


class MicroBatches(Sampler[Any]):
    """Batch sampler of micro-batches that are the same at any world size; rank r of n takes every n-th of a step.

    `DistributedSampler.batches` divides a step by samples instead. A batch norm would see other micro-batches then.

    Args:
        sampler: The order of the epoch, and the position in it.
        images: Images of the data set; an incomplete last step of an epoch is dropped.
        size: Images of a micro-batch.
        count: Micro-batches of a step on all ranks.

    Attributes:
        per_rank: Micro-batches of a step on this rank.
        images: Images of a step.
        steps: Steps of an epoch.
    """

    def __init__(self, sampler: DistributedSampler, images: int, size: int, count: int) -> None:
        self._sampler, self._size = sampler, size
        self._mine = range(sampler.rank, count, sampler.world_size)
        self.per_rank = len(self._mine)
        self.images = size * count
        self.steps = images // self.images

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the epoch and the images' indices of each micro-batch that is left of the epoch on this rank."""
        order = self._sampler.begin(self.images)
        for start in range(0, len(order) - self.images + 1, self.images):
            for number in self._mine:
                first = start + number * self._size
                yield self._sampler.epoch, order[first : first + self._size]


class Images(ABC):
    """Images for training and test, with batches [n, channels, height, width] of zero mean and unit variance.

    Attributes:
        name: Name of the data set.
        class_names: Names of the classes, by label.
        shape: Channels, height and width of an image.
        mean: Mean of each channel, from 0 to 255.
        std: Standard deviation of each channel.
        can_flip: True if a mirror image is of the same class.
    """

    name: str
    # Not classes: in a function of a Ray program cloudpickle takes data.classes for torch.classes, and can't pickle it.
    class_names: list[str]
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    can_flip = True

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of training images."""

    @abstractmethod
    def limit(self, count: int) -> None:
        """Train on that many of the images only."""

    @abstractmethod
    def train_batches(
        self, micro_batches: MicroBatches, device: torch.device, *, seed: int, flip: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of this rank's micro-batches that are left of the epoch, augmented."""

    @abstractmethod
    def test_batches(self, size: int, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, in batches; each image is on exactly one rank."""

    def _normalizer(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (self.mean, self.std))
        return lambda images: (images.float() - mean) / std


class ImagesInMemory(Images):
    """A small data set: uint8 images [n, channels, height, width] and int64 labels [n], on the GPU if they fit."""

    def __init__(
        self, name: str, class_names: list[str], train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
    ) -> None:
        self.name, self.class_names = name, class_names
        self.train, self.test = train, test
        channels, height, width = train[0].shape[1:]
        self.shape = (channels, height, width)
        pixels = train[0][:: max(1, len(train[0]) // 1000)].float()
        self.mean, self.std = pixels.mean((0, 2, 3)).tolist(), pixels.std((0, 2, 3)).tolist()

    def __len__(self) -> int:
        return len(self.train[1])

    def limit(self, count: int) -> None:
        chosen = sample_of(len(self), count)
        self.train = (self.train[0][chosen], self.train[1][chosen])

    def train_batches(
        self, micro_batches: MicroBatches, device: torch.device, *, seed: int, flip: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if device.type == "cuda" and self.train[0].nbytes < torch.cuda.mem_get_info()[0] // 2:
            self.train = (self.train[0].to(device), self.train[1].to(device))
        normalize, flips = self._normalizer(device), dict[int, Tensor]()
        for epoch, indices in micro_batches:
            if epoch not in flips:
                generator = torch.Generator().manual_seed(seed * EPOCH_STRIDE + epoch)
                flips = {epoch: torch.rand(len(self), generator=generator) < 0.5}
            chosen = torch.tensor(indices)
            where = chosen.to(self.train[0].device)
            images, labels = (part[where].to(device) for part in self.train)
            if flip:
                images = torch.where(flips[epoch][chosen].to(device)[:, None, None, None], images.flip(-1), images)
            yield normalize(images), labels

    def test_batches(self, size: int, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
        normalize = self._normalizer(ranks.device)
        images, labels = (part[ranks.rank :: ranks.world_size] for part in self.test)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            yield normalize(images[part].to(ranks.device)), labels[part].to(ranks.device)


def sample_of(total: int, count: int) -> Tensor:
    """Return the indices of that many images, the same in each run."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count]
