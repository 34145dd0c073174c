"""Micro-batches of a global batch for gradient accumulation, weighted so that any number of ranks agrees."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ray_on_ecs.checkpoint.modules import without_compile


def microbatches(
    batch: Any,
    global_batch_size: int,
    *,
    size: int | None = None,
    model: nn.Module | None = None,
    count: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Any, float]]:
    """Yield the micro-batches of this rank's share of a global batch, each with the weight of its mean loss.

    With `(weight * loss).backward()` for each micro-batch, the gradients that DDP or FSDP average over the ranks are
    the gradients of the mean loss over the global batch, also if the ranks have different numbers of samples. All ranks
    get the same number of micro-batches. The share comes from `DistributedSampler.batches(global_batch_size)`.

    That is exact, except for rounding, for a loss that is a mean over samples, or with `count` over what it counts, and
    for a model without batch statistics. A loss that compares the samples of a batch depends on how it is divided.

    Args:
        batch: The share: a tensor, or a tuple, list or dictionary of tensors of equal length.
        global_batch_size: Samples of the step on all ranks.
        size: Maximum samples of a micro-batch, exceeded by one where the shares differ; None for a single one.
        model: The DDP or FSDP2 module; it then synchronizes gradients only with the last micro-batch.
        count: For a loss that is a mean over tokens or pixels: the function that counts them in a micro-batch, such as
            `lambda part: (part["labels"] != -100).sum()`. All ranks add their counts. The weight of a micro-batch
            without any is 0, and its loss has to be a number: divide a sum by `count.clamp(min=1)`.

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
    number_of_parts = min(-(-largest_share // size), smallest_share) if size else 1
    parts = [_split(batch, number, number_of_parts) for number in range(number_of_parts)]
    counts, total = [_length(part) for part in parts], global_batch_size
    if count is not None:
        counts = [int(count(part)) for part in parts]
        total = _sum_of_ranks(sum(counts))
    for number, part in enumerate(parts):
        with _without_sync(model) if number < number_of_parts - 1 else nullcontext():
            yield part, counts[number] * world_size / max(total, 1)


def _sum_of_ranks(number: int) -> int:
    if not dist.is_initialized():
        return number
    has_cpu = "cpu" in dist.get_backend_config()
    summed = torch.tensor(number, device="cpu" if has_cpu else torch.device("cuda", torch.cuda.current_device()))
    dist.all_reduce(summed)
    return int(summed)


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
