"""Micro-batches of a global batch for gradient accumulation, weighted so that any number of ranks agrees."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ray_on_ecs.checkpoint.modules import without_compile


def microbatches(
    batch: Any, global_batch_size: int, *, size: int | None = None, model: nn.Module | None = None
) -> Iterator[tuple[Any, float]]:
    """Yield the micro-batches of this rank's share of a global batch, each with the weight of its mean loss.

    With `(weight * loss).backward()` for each micro-batch, the gradients that DDP or FSDP average over the ranks are
    the gradients of the mean loss over the global batch, also if the ranks have different numbers of samples. All ranks
    get the same number of micro-batches. The share comes from `DistributedSampler.batches(global_batch_size)`.

    Args:
        batch: The share: a tensor, or a tuple, list or dictionary of tensors of equal length.
        global_batch_size: Samples of the step on all ranks.
        size: Maximum samples of a micro-batch, exceeded by one where the shares differ; None for a single one.
        model: The DDP or FSDP2 module; it then synchronizes gradients only with the last micro-batch.

    Raises:
        ValueError: The batch is not a rank's share of the global batch.
        TypeError: It has a value that is not a tensor.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    smallest_share = global_batch_size // world_size
    largest_share = -(-global_batch_size // world_size)
    samples = _length(batch)
    if samples not in (smallest_share, largest_share):
        raise ValueError(
            f"batch: {samples} samples are not a rank's share of {global_batch_size} on {world_size} ranks, which is "
            f"{largest_share}; give the loader batch_sampler=sampler.batches({global_batch_size})"
        )
    count = min(-(-largest_share // size), smallest_share) if size else 1
    for number in range(count):
        microbatch = _split(batch, number, count)
        with _without_sync(model) if number < count - 1 else nullcontext():
            yield microbatch, _length(microbatch) * world_size / global_batch_size


def _length(batch: Any) -> int:
    while isinstance(batch, Mapping | list | tuple):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    if not isinstance(batch, Tensor):
        raise TypeError(f"batch: a {type(batch).__name__} can't be divided; give only tensors")
    return len(batch)


def _split(batch: Any, number: int, count: int) -> Any:
    """Return one of `count` parts of a batch."""
    if isinstance(batch, Tensor):
        return batch.tensor_split(count)[number]
    if isinstance(batch, Mapping):
        return {name: _split(value, number, count) for name, value in batch.items()}
    if not isinstance(batch, list | tuple):
        raise TypeError(f"batch: a {type(batch).__name__} can't be divided; give only tensors")
    return tuple(_split(value, number, count) for value in batch)


@contextmanager
def _without_sync(model: nn.Module | None) -> Generator[None]:
    """Accumulate gradients on each rank, as DDP's `no_sync` and FSDP2's `set_requires_gradient_sync` do."""
    model = None if model is None else without_compile(model)
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
