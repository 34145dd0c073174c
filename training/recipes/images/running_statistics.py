"""The running statistics of batch norm, in a step that the micro-batches of several ranks make.

Batch norm normalizes each micro-batch separately. Evaluation uses the mean of the statistics over all micro-batches, on
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

T = TypeVar("T")


def once_per_step(model: nn.Module, microbatches: Sequence[T]) -> Iterator[T]:
    """Yield the micro-batches of a step, after which the running statistics have moved once, by the mean over them.

    So they are those of a run in which other ranks had taken the other micro-batches.
    """
    buffers = [buffer for norm in _norms(model) for buffer in norm.buffers()]
    if len(microbatches) == 1 or not buffers:
        yield from microbatches
        return
    statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in buffers]
    means = [torch.zeros_like(buffer) for buffer in statistics]
    for microbatch in microbatches:
        torch._foreach_copy_(buffers, before)
        yield microbatch
        torch._foreach_add_(means, statistics, alpha=1 / len(microbatches))
    torch._foreach_copy_(statistics, means)


def sync_buffers(model: nn.Module, weight: float) -> None:
    """Give every rank the same buffers: of running statistics the weighted mean over the ranks, of others rank 0's.

    A running average is linear in what it averages, so the mean over the ranks is what one worker would have had.

    Args:
        model: The model; every rank must call it.
        weight: This rank's fraction of the micro-batches of a step.
    """
    if not dist.is_initialized():
        return
    running = {id(buffer) for norm in _norms(model) for buffer in (norm.running_mean, norm.running_var)}
    averaged = [buffer for buffer in model.buffers() if id(buffer) in running]
    others = [buffer for buffer in model.buffers() if id(buffer) not in running]
    _coalesced(averaged, lambda values: dist.all_reduce(values.mul_(weight)))
    _coalesced(others, lambda values: dist.broadcast(values, src=0))


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _coalesced(buffers: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Run a collective over all values at once, for each dtype, instead of once for each buffer."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        values = torch.cat([buffer.flatten() for buffer in same])
        collective(values)
        for buffer, part in zip(same, values.split([buffer.numel() for buffer in same]), strict=True):
            buffer.copy_(part.view_as(buffer))
