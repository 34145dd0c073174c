"""Micro-batches of a global batch, with weights by which any number of ranks has the same gradients."""

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
    """Yield this rank's share of a global batch in parts, each with the weight of its mean loss.

    With `(weight * loss).backward()` for each part, the gradients that DDP or FSDP average over the ranks are those of
    the mean loss over the global batch, also where the ranks have different numbers of samples. All ranks get the same
    number of parts. Take the share from `DistributedSampler.batches(global_batch_size)`.

    Args:
        batch: The share: a tensor, or a tuple, list or dictionary of tensors of equal length.
        global_batch_size: Samples of the step on all ranks.
        size: The most samples of a part, one more where the shares differ; without it there is one part.
        model: The DDP or FSDP2 module, whose gradients are then exchanged with the last part alone.

    Raises:
        ValueError: The batch is not a rank's share of such a global batch.
        TypeError: It has something else than tensors.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    least, most = global_batch_size // world_size, -(-global_batch_size // world_size)
    if (samples := _length(batch)) not in (least, most):
        raise ValueError(
            f"batch: {samples} samples are not a rank's share of {global_batch_size} on {world_size} ranks, which is "
            f"{most}; give the loader batch_sampler=sampler.batches({global_batch_size})"
        )
    parts = min(-(-most // size), least) if size else 1
    for number in range(parts):
        part = _part(batch, number, parts)
        with _without_sync(model) if number < parts - 1 else nullcontext():
            yield part, _length(part) * world_size / global_batch_size


def _length(batch: Any) -> int:
    while isinstance(batch, Mapping | list | tuple):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    if not isinstance(batch, Tensor):
        raise TypeError(f"batch: a {type(batch).__name__} can't be divided; give tensors alone")
    return len(batch)


def _part(batch: Any, number: int, parts: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.tensor_split(parts)[number]
    if isinstance(batch, Mapping):
        return {name: _part(value, number, parts) for name, value in batch.items()}
    if not isinstance(batch, list | tuple):
        raise TypeError(f"batch: a {type(batch).__name__} can't be divided; give tensors alone")
    return tuple(_part(value, number, parts) for value in batch)


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
