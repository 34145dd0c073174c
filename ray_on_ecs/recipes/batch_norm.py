"""Batch norms of a model that accumulates gradients: running statistics that move once a step.

A batch norm normalizes each micro-batch by itself. Its running statistics would move with each one, and end elsewhere
on one rank with four micro-batches than on four ranks with one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNorms:
    """Running statistics of a model, which a step moves once, by the mean over its micro-batches and ranks.

    The momentum stays as it is: torch.compile would compile a model again for each new value.

    Args:
        model: The module, not the one that DDP or torch.compile returned.
        micro_batches: Micro-batches of a step on this rank.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        # Without momentum they are the mean over all batches so far, whose order doesn't matter.
        self._moving = _statistics(norm for norm in norms if norm.momentum is not None)
        self._all = _statistics(norms)
        self._micro_batches = micro_batches
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []

    def before_forward(self) -> None:
        """Start each micro-batch from the statistics before the step."""
        if self._micro_batches == 1 or not self._moving:
            return
        if not self._before:
            self._before = [each.clone() for each in self._moving]
            self._sums = [torch.zeros_like(each) for each in self._moving]
        else:
            torch._foreach_add_(self._sums, self._moving)
            torch._foreach_copy_(self._moving, self._before)

    def after_step(self) -> None:
        """Move the statistics to the mean of those after each micro-batch."""
        if self._before:
            torch._foreach_add_(self._sums, self._moving)
            torch._foreach_div_(self._sums, self._micro_batches)
            torch._foreach_copy_(self._moving, self._sums)
            self._before = []

    def average_over_ranks(self, micro_batches: int) -> None:
        """Set the statistics to the mean over the ranks, weighted by their parts of a step's micro-batches.

        Once before a test is enough: statistics move linearly, so the mean of the ranks' is what one rank would have.
        """
        for each in self._all if dist.is_initialized() else ():
            dist.all_reduce(each.mul_(self._micro_batches / micro_batches))


def _statistics(norms: Iterable[_BatchNorm]) -> list[Tensor]:
    found = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in found if each is not None]
