"""Stateful distributed sampler, resumable within an epoch on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

# seed * EPOCH_STRIDE + epoch is unique as long as there are fewer epochs than this.
EPOCH_STRIDE = 1_000_003


class DistributedSampler(Sampler[int]):
    """Splits a data set among the ranks like torch's sampler of this name, starting at a position within the epoch.

    The order of an epoch depends only on seed and epoch. Rank r of n takes every n-th index, so the ranks' batches of a
    step are one slice of that order for any number of ranks. A `Checkpointer` that has the sampler in its `state`
    advances the position by the samples that the loop has used; samples that a loader has prefetched don't count.

    Args:
        dataset: The data set, or any object of that length.
        seed: Seed of the order, the same on all ranks.
        shuffle: Reshuffle in each epoch; otherwise keep the order of the data set.

    Attributes:
        rank: Rank of this process.
        world_size: The number of ranks.
        epoch: The epoch, counted from 0.
        position: Samples of this epoch that all ranks have used.
    """

    def __init__(self, dataset: Sized, *, seed: int = 0, shuffle: bool = True) -> None:
        self._samples = len(dataset)
        self._seed = seed
        self._shuffle = shuffle
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._ended: int | None = None
        self._restore: Callable[[], None] | None = None
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the current one continues from its position."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0

    def counts_one_rank(self, samples: int) -> bool:
        """Return True if, after an epoch whose last step had these samples, the position seems to count one rank's."""
        missing = self._samples - self.position * self.world_size
        has_more = self.position + samples <= self._samples  # a step as large as the last would follow
        return self.world_size > 1 and has_more and abs(missing) < samples * self.world_size

    def restore_random(self, restore: Callable[[], None]) -> None:
        """Restore the random state again when a loader continues within the epoch.

        A DataLoader draws a random number when its iterator starts; without the interruption it started with the epoch.
        """
        self._restore = restore if self.position else None

    def begin(self, minimum: int = 1) -> list[int]:
        """Return the rest of the epoch; RuntimeError for fewer than the minimum again: a loop would never end."""
        if self._restore:
            self._restore()
        self._restore = None
        remaining = self.order()[self.position :]
        has_ended = len(remaining) < minimum
        if has_ended and self._ended == self.epoch:
            raise RuntimeError(
                f"epoch {self.epoch} has no samples left; call end_epoch() or set_epoch() after each epoch"
            )
        self._ended = self.epoch if has_ended else None
        return remaining

    def batches(self, global_batch_size: int) -> GlobalBatches:
        """Return a `batch_sampler` for a DataLoader: this rank's share of each global batch.

        Args:
            global_batch_size: Samples of a step on all ranks; need not be a multiple of the number of ranks.

        Raises:
            ValueError: It is below the number of ranks, or above the length of the data set.
        """
        if not self.world_size <= global_batch_size <= self._samples:
            raise ValueError(
                f"global_batch_size: {global_batch_size} must be at least {self.world_size}, the number of ranks, and "
                f"at most {self._samples}, the number of samples"
            )
        return GlobalBatches(self, self._samples, global_batch_size)

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of this rank's indices; the epoch's first indices pad the last round."""
        indices = self.begin()
        missing = -len(indices) % self.world_size
        if missing:
            indices += (self.order() * self.world_size)[:missing]
        yield from indices[self.rank :: self.world_size]

    def __len__(self) -> int:
        """Return the number of a rank's indices in a whole epoch, also in the middle of one."""
        return -(-self._samples // self.world_size)

    def order(self) -> list[int]:
        """Return the order of the whole epoch, the same on all ranks."""
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed * EPOCH_STRIDE + self.epoch)
        return torch.randperm(self._samples, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self.epoch, "position": self.position, "samples": self._samples, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; ValueError if the data set has another length, or the seed is another one."""
        for name, value in (("samples", self._samples), ("seed", self._seed)):
            if state[name] != value:
                raise ValueError(f"the sampler's {name} was {state[name]}, and is {value} now")
        self.epoch = state["epoch"]
        self.position = state["position"]


class GlobalBatches(Sampler[list[int]]):
    """Batch sampler of a rank's shares of an epoch's global batches; shares differ by at most one sample.

    An incomplete last batch is dropped. Rank r of n gets every n-th sample of the batch.
    """

    def __init__(self, sampler: DistributedSampler, samples: int, size: int) -> None:
        self._sampler = sampler
        self._samples = samples
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch's shares."""
        indices = self._sampler.begin(self._size)
        for start in range(0, len(indices) - self._size + 1, self._size):
            yield indices[start + self._sampler.rank : start + self._size : self._sampler.world_size]

    def __len__(self) -> int:
        """Return the number of global batches in a whole epoch, also in the middle of one."""
        return self._samples // self._size
