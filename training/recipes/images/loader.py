"""The order in which the ranks see the images, and the batches that it makes: normalized, augmented, on the device.

No Python runs for a single image. The images of an epoch are shuffled as a whole and cut into global batches, of which
each rank takes its shares, so that any number of workers together makes the same steps. What doesn't fill a last global
batch sits out the epoch; the next shuffle leaves out others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from training.errors import UsageError
from training.recipes.images.augment import Augmentation
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split

PREFETCH_BATCHES = 4
TEST_BATCH_FACTOR = 4  # test batches are so many times larger: they need no gradients
# A data set that takes more of a GPU's free memory stays in the node's.
MAX_MEMORY_FRACTION = 0.5
SEED_STRIDE = 2**20  # more than anybody's epochs: no two epochs of two runs share a shuffle

Batch = tuple[Tensor, Tensor]


class BatchLoader:
    """A data set as one rank takes it: float images [n, channels, height, width] and labels [n], on its device.

    Args:
        dataset: The whole data set.
        config: The run's settings.
        rank: This rank.
        world_size: The number of ranks.
        device: Where the batches are wanted.

    Raises:
        UsageError: The training images don't fill one step.
    """

    def __init__(self, dataset: Dataset, config: ImageConfig, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.config, self.batch_size = config, config.batch_size
        self.microbatches = config.microbatches(world_size)
        self.local_microbatches = range(rank, self.microbatches, world_size)
        self._check(len(dataset.train))
        self.on_device = _fits(device, dataset, config)
        self.dataset = dataset.to(device) if self.on_device else dataset

    @property
    def global_batch(self) -> int:
        """Images in a step, of all ranks."""
        return self.batch_size * self.microbatches

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return len(self.dataset.train) // self.global_batch

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from a step on, for each step one of each of its shares.

        Shuffle and changes are the same whatever the number of ranks and wherever the epoch is entered.
        """
        generator = torch.Generator().manual_seed(self.config.seed * SEED_STRIDE + epoch)
        order = torch.randperm(len(self.dataset.train), generator=generator)
        mirror = self.dataset.flip_invariant and self.config.horizontal_flip == "on"
        changes = Augmentation.draw(len(order), mirror, self.config.max_shift, generator).to(self.device)
        places = [
            self._slice(step, share) for step in range(first_step, self.steps) for share in self.local_microbatches
        ]
        batches = self._take(self.dataset.train, order, places)
        for place, (images, labels) in zip(places, batches, strict=True):
            yield self.dataset.normalize(changes[place].apply(images)), labels

    def test(self) -> Iterator[Batch]:
        """This rank's share of the test set: every image on exactly one rank, none repeated."""
        order = torch.arange(self.rank, len(self.dataset.test), self.world_size)
        size = TEST_BATCH_FACTOR * self.batch_size
        places = [slice(first, first + size) for first in range(0, len(order), size)]
        for images, labels in self._take(self.dataset.test, order, places):
            yield self.dataset.normalize(images), labels

    def _check(self, samples: int) -> None:
        if samples < self.global_batch:
            raise UsageError(
                f"--batch-size: {self.batch_size} on each of {self.microbatches} workers is {self.global_batch} images "
                f"per step, and the training set has {samples}; use {samples // self.microbatches} or less, or fewer "
                "workers"
            )

    def _slice(self, step: int, share: int) -> slice:
        """Where in the epoch's order a share of a step lies."""
        first = step * self.global_batch + share * self.batch_size
        return slice(first, first + self.batch_size)

    def _take(self, split: Split, order: Tensor, places: list[slice]) -> Iterator[Batch]:
        """The images and labels at these places of the order, as they are stored, on the device."""
        if self.on_device:
            order = order.to(self.device)
            for place in places:
                yield split[order[place]]
            return
        for images, labels in prefetch(lambda place: self._pinned(split[order[place]]), places):
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _pinned(self, batch: Batch) -> Batch:
        """In memory that a GPU copies from by itself."""
        return (batch[0].pin_memory(), batch[1].pin_memory()) if self.device.type == "cuda" else batch


def prefetch(make: Callable[[slice], Batch], places: list[slice]) -> Iterator[Batch]:
    """What `make` gives for each place, in order, made on another thread while the one before is used."""
    with ThreadPoolExecutor(1, "batches") as pool:
        waiting: deque[Future[Batch]] = deque()
        for place in places:
            waiting.append(pool.submit(make, place))
            if len(waiting) > PREFETCH_BATCHES:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _fits(device: torch.device, dataset: Dataset, config: ImageConfig) -> bool:
    """Whether the data set goes to the device as a whole."""
    if config.data_on_device != "auto" or device.type != "cuda":
        return config.data_on_device != "off"
    free, _ = torch.cuda.mem_get_info(device)
    return dataset.nbytes <= MAX_MEMORY_FRACTION * free
