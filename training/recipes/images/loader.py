"""The order in which the ranks see the images, and the batches made of it: normalized, augmented, on the device.

No Python runs for a single image in memory; those in files are prepared by a feed, batch by batch. The images of an
epoch are shuffled as a whole and cut into global batches, of which each rank takes its micro-batches, so that any
number of workers makes the same steps. Images that don't fill a last global batch are left out of the epoch; the next
shuffle leaves out others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ray_on_ecs.errors import UsageError, counted
from training.engine import random_state
from training.engine.feed import Feed, in_threads
from training.recipes.images.augment import Augmentation
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.files import DecodedSplit, FileSplit, decode, draw_crops

# Test batches are larger by this factor, because they need no gradients.
TEST_BATCH_FACTOR = 4
# A data set that takes more of a GPU's free memory stays in the node's.
MAX_MEMORY_FRACTION = 0.5

# Images [n, channels, height, width] and labels [n].
Batch = tuple[Tensor, Tensor]


class BatchLoader:
    """A data set as one rank takes it: float images [n, channels, height, width] and labels [n], on its device.

    Args:
        dataset: The whole data set.
        config: The run's settings.
        rank: This rank.
        world_size: The number of ranks.
        device: Where the batches are needed.
        feed: Prepares the batches of images that are in files.

    Raises:
        UsageError: The training images don't fill one step, or there are no test images.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: ImageConfig,
        rank: int,
        world_size: int,
        device: torch.device,
        feed: Feed = in_threads,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.config = config
        self.batch_size = config.local_batch_size
        self.microbatches = config.microbatches(world_size)
        self.local_microbatches = range(rank, self.microbatches, world_size)
        self.feed = feed
        self._check(dataset)
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

    def train(self, epoch: int, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each step of an epoch, from a step on.

        Shuffle and augmentation are the same whatever the number of ranks and wherever the epoch is entered.
        """
        seed = random_state.derive_seed(self.config.seed, random_state.SHUFFLE, epoch)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.dataset.train), generator=generator)
        flip = self.dataset.flip_invariant and self.config.horizontal_flip == "on"
        augmentation = Augmentation.draw(len(order), flip, self.config.max_shift, generator)
        crops = draw_crops(len(order), generator) if self.config.random_crop == "on" else None
        steps = range(first_step, self.steps)
        slices = [self._slice(step, microbatch) for step in steps for microbatch in self.local_microbatches]
        microbatches: list[Batch] = []
        for images, labels in self._take(self.dataset.train, order, slices, augmentation, crops):
            microbatches.append((self.dataset.normalize(images), labels))
            if len(microbatches) == len(self.local_microbatches):
                yield microbatches
                microbatches = []

    def test(self) -> Iterator[Batch]:
        """Yield this rank's part of the test set: every image on exactly one rank, none repeated."""
        order = torch.arange(self.rank, len(self.dataset.test), self.world_size)
        # Of files, several batches are ready ahead; in memory they are the same ones.
        of_files = isinstance(self.dataset.test, FileSplit | DecodedSplit)
        size = self.batch_size * (1 if of_files else TEST_BATCH_FACTOR)
        slices = [slice(first, first + size) for first in range(0, len(order), size)]
        for images, labels in self._take(self.dataset.test, order, slices):
            yield self.dataset.normalize(images), labels

    def _check(self, dataset: Dataset) -> None:
        samples = len(dataset.train)
        if len(dataset.test) == 0:
            raise UsageError(
                f"--dataset: {dataset.name!r} has no test images, which decide on the best epoch; split some off its "
                f"{samples} training images"
            )
        if samples < self.global_batch:
            workers = counted(self.microbatches, "worker")
            raise UsageError(
                f"--batch-size: {self.batch_size} on each of {workers} is {self.global_batch} images per step, and the "
                f"training set has {samples}; use {samples // self.microbatches} or less, or fewer workers"
            )

    def _slice(self, step: int, microbatch: int) -> slice:
        """Return where in the epoch's order a micro-batch of a step is."""
        first = step * self.global_batch + microbatch * self.batch_size
        return slice(first, first + self.batch_size)

    def _take(
        self,
        split: Split,
        order: Tensor,
        slices: list[slice],
        augmentation: Augmentation | None = None,
        crops: Tensor | None = None,
    ) -> Iterator[Batch]:
        """Yield the changed images, uint8, and labels of each slice of the order, on the device."""
        if isinstance(split, FileSplit):
            yield from self._prepared(split, order, slices, augmentation, crops)
            return
        on_device = augmentation.to(self.device) if augmentation else None
        for part, (images, labels) in zip(slices, self._stored(split, order, slices), strict=True):
            yield on_device[part].apply(images) if on_device else images, labels

    def _stored(self, split: Split, order: Tensor, slices: list[slice]) -> Iterator[Batch]:
        """Yield the stored images and labels of each slice of the order, on the device."""
        if self.on_device:
            order = order.to(self.device)
            for part in slices:
                yield split[order[part]]
            return
        for batch in in_threads(slices, lambda part: self._pinned(split[order[part]])):
            yield self._sent(batch)

    def _prepared(
        self,
        split: FileSplit,
        order: Tensor,
        slices: list[slice],
        augmentation: Augmentation | None,
        crops: Tensor | None,
    ) -> Iterator[Batch]:
        """Yield the images and labels of each slice of the order as the feed has prepared them, on the device."""
        parts = (
            split.part(order[part], crops if crops is None else crops[part], augmentation and augmentation[part])
            for part in slices
        )
        for part, images in zip(slices, self.feed(parts, decode), strict=True):
            batch = torch.from_numpy(images), split.labels[order[part]]
            yield self._sent(self._pinned(batch))

    def _sent(self, batch: Batch) -> Batch:
        images, labels = batch
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _pinned(self, batch: Batch) -> Batch:
        """Move a batch to page-locked memory, which a GPU copies from asynchronously."""
        images, labels = batch
        return (images.pin_memory(), labels.pin_memory()) if self.device.type == "cuda" else batch


def _fits(device: torch.device, dataset: Dataset, config: ImageConfig) -> bool:
    """Whether the whole data set is kept on the device."""
    if isinstance(dataset.train, FileSplit):
        return False
    if config.data_on_device != "auto" or device.type != "cuda":
        return config.data_on_device != "off"
    free, _ = torch.cuda.mem_get_info(device)
    return dataset.nbytes <= MAX_MEMORY_FRACTION * free
