"""Search of the largest micro-batch that fits into the memory of the GPUs, by trial passes before the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ray_on_ecs.recipes.ranks import sum_over_ranks

# Of the memory that is free at the beginning; the rest is for gaps between tensors and for longer batches.
USED = 0.9


def largest_fitting(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest of 1, 2, 4, … and `most` for which `fits` is true, or 1; sizes are tried in this order."""
    size = 1
    if not fits(1):
        return 1
    while size < most and fits(min(2 * size, most)):
        size = min(2 * size, most)
    return size


def memory_would_fit(peaks: Sequence[tuple[int, int]], size: int, limit: int) -> bool:
    """Return True if a batch of this size is expected to need at most `limit` bytes.

    Args:
        peaks: Sizes that were tried, in ascending order, and their largest memory; each sample needs as much.
        size: The next size.
        limit: Bytes.
    """
    if len(peaks) < 2:
        return True
    (smaller, low), (larger, high) = peaks[-2:]
    return high + (size - larger) * (high - low) / (larger - smaller) <= limit


def find_batch_size(
    loss: Callable[[int], Tensor], parameters: Iterable[nn.Parameter], most: int, device: torch.device
) -> int:
    """Return the largest number of sequences whose forward and backward pass fits on the GPUs of all ranks.

    All ranks call it at once, before DDP and the optimizer are made; the memory for the moments of AdamW is set aside.
    Weights, gradients and random state stay as they are. A size that is expected not to fit is not tried: a rank that
    runs out of memory in the middle of a sharded pass would leave the others waiting.

    Args:
        loss: Returns the loss of a batch of this size.
        parameters: The parameters that are trained.
        most: The largest useful size, a rank's share of the global batch.
        device: This rank's GPU.
    """
    trained = list(parameters)
    peaks: list[tuple[int, int]] = []
    torch.cuda.empty_cache()
    limit = USED * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device))

    def fits(size: int) -> bool:
        is_fit = memory_would_fit(peaks, size, int(limit))
        if not _all_ranks(is_fit, device):
            return False
        torch.cuda.reset_peak_memory_stats(device)
        try:
            with torch.random.fork_rng([device]):
                loss(size).backward()
        except torch.OutOfMemoryError:
            is_fit = False
        peaks.append((size, torch.cuda.max_memory_allocated(device)))
        for parameter in trained:
            parameter.grad = None
        return _all_ranks(is_fit and peaks[-1][1] <= limit, device)

    moments = list(_moments(trained))
    size = largest_fitting(fits, most)
    del moments
    torch.cuda.empty_cache()
    return size


def _moments(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield tensors as large as the two moments that AdamW keeps of each parameter."""
    for parameter in parameters:
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        yield torch.empty((2, *local.shape), dtype=local.dtype, device=local.device)


def _all_ranks(is_true: bool, device: torch.device) -> bool:
    return not sum_over_ranks(torch.tensor(0 if is_true else 1, device=device)).item()
