"""A sampler whose position survives a restart, on as many ranks or on another number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

# Seeds of two epochs must differ for any two seeds that users choose: a prime that is larger than the number of epochs.
EPOCH_STRIDE = 1_000_003


class DistributedSampler(Sampler[int]):
    """Split a data set among the ranks, like torch's sampler of this name, from a position within the epoch on.

    The order of an epoch follows from seed and epoch alone. Rank r of n takes every n-th index, so the ranks' batches
    of a step are one slice of that order, however many ranks there are. A `Checkpointer` that has the sampler in its
    `state` advances the position by the samples that the loop has used, not by those that a loader has fetched.

    Args:
        dataset: The data set, or anything of that length.
        seed: Seed of the order, the same on all ranks.
        shuffle: Shuffle again in each epoch; otherwise keep the order of the data set.

    Attributes:
        rank: This process among all.
        world_size: The number of processes.
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
        """Begin an epoch; the one that is under way goes on from its position."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def counts_one_rank(self, samples: int) -> bool:
        """Return whether, at the end of an epoch, the position seems to be that of one rank instead of all.

        Args:
            samples: Those of the last step.
        """
        missing = self._samples - self.position * self.world_size
        return self.world_size > 1 and abs(missing) < samples * self.world_size

    def restore_random(self, restore: Callable[[], None]) -> None:
        """Restore the random numbers once more when a loader goes on within the epoch.

        A DataLoader draws a number when it begins; without the interruption it began at the start of the epoch.
        """
        self._restore = restore if self.position else None

    def begin(self, least: int = 1) -> list[int]:
        """Return the indices that are left of the epoch.

        Raises:
            RuntimeError: There are fewer than the least number for the second time: a loop would go on for ever.
        """
        if self._restore:
            self._restore()
        self._restore = None
        rest = self.remaining()
        has_ended = len(rest) < least
        if has_ended and self._ended == self.epoch:
            raise RuntimeError(f"epoch {self.epoch} has no samples left; call end_epoch() or set_epoch() after each")
        self._ended = self.epoch if has_ended else None
        return rest

    def batches(self, global_batch_size: int) -> GlobalBatches:
        """Return a `batch_sampler` for a DataLoader: this rank's share of each global batch.

        Args:
            global_batch_size: Samples of a step on all ranks; it need not be a multiple of their number.

        Raises:
            ValueError: It is less than the number of ranks, or more than the data set has.
        """
        if not self.world_size <= global_batch_size <= self._samples:
            raise ValueError(
                f"global_batch_size: {global_batch_size} must be at least {self.world_size}, the number of ranks, and "
                f"at most {self._samples}, the number of samples"
            )
        return GlobalBatches(self, self._samples, global_batch_size)

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of this rank's indices; the epoch's first ones fill up the last round."""
        rest = self.begin()
        missing = -len(rest) % self.world_size
        if missing:
            rest += (self.order() * self.world_size)[:missing]
        yield from rest[self.rank :: self.world_size]

    def __len__(self) -> int:
        """Return the number of a rank's indices in a whole epoch, also in the middle of one."""
        return -(-self._samples // self.world_size)

    def order(self) -> list[int]:
        """Return the order of the whole epoch, the same on all ranks."""
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed * EPOCH_STRIDE + self.epoch)
        return torch.randperm(self._samples, generator=generator).tolist()

    def remaining(self) -> list[int]:
        """Return the indices of the epoch that no rank has used."""
        return self.order()[self.position :]

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self.epoch, "position": self.position, "samples": self._samples, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ValueError: It is of another data set, or of another seed.
        """
        for name, value in (("samples", self._samples), ("seed", self._seed)):
            if state[name] != value:
                raise ValueError(f"the sampler's {name} was {state[name]}, and is {value} now")
        self.epoch, self.position = state["epoch"], state["position"]


class GlobalBatches(Sampler[list[int]]):
    """A rank's shares of the global batches of an epoch, which differ by one sample at most between the ranks.

    A last batch that is not full is left out. The share of a rank is every n-th sample of the batch.
    """

    def __init__(self, sampler: DistributedSampler, samples: int, size: int) -> None:
        self._sampler = sampler
        self._samples = samples
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch's shares."""
        rest = self._sampler.begin(self._size)
        for first in range(0, len(rest) - self._size + 1, self._size):
            yield rest[first + self._sampler.rank : first + self._size : self._sampler.world_size]

    def __len__(self) -> int:
        """Return the number of global batches in a whole epoch, also in the middle of one."""
        return self._samples // self._size
