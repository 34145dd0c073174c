"""Batch norm in a step that several micro-batches make: its running statistics, and groups of a fixed size.

By default a model keeps its own batch norm and each micro-batch is normalized by itself, which costs nothing. A model
that normalizes 32 images together learns another curve than one that takes 256, though. `--norm-batch` fixes that
number, whatever the number of workers: a worker with a larger batch splits it ("ghost batch norm", Hoffer et al. 2017,
https://arxiv.org/abs/1705.08741), and workers with smaller ones pool theirs, by `nn.SyncBatchNorm` on GPUs and by the
same arithmetic on CPUs, for which PyTorch has none.

Weights and buffers have the names and meanings of `nn.BatchNorm*d`: a state_dict loads into the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from training.errors import UsageError

# Only these are replaced: a subclass may do more than its name says.
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

T = TypeVar("T")


@dataclass(frozen=True)
class BatchNormGroups:
    """How a worker's micro-batch is normalized: in several groups, or in one group with those of other ranks."""

    groups_per_rank: int
    ranks_per_group: int

    @classmethod
    def for_run(cls, batch_size: int, norm_batch: int, world_size: int) -> BatchNormGroups:
        """Return groups of `norm_batch` images if they come out even, otherwise of the next smaller size.

        Groups of ranks have one size, so it divides `world_size`. No group is a single image, which has no variance.
        With a `norm_batch` of 0 each micro-batch is a group.
        """
        if not norm_batch:
            return cls(1, 1)
        if batch_size >= norm_batch:
            return cls(min(math.ceil(batch_size / norm_batch), max(batch_size // 2, 1)), 1)
        return cls(1, max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * batch_size <= norm_batch))


def group(model: nn.Module, groups: BatchNormGroups, device: torch.device) -> nn.Module:
    """Return the model with batch norms over these groups; every rank must call it, because it creates process groups.

    Raises:
        UsageError: A batch norm of the model is a subclass, whose own behaviour would be lost.
    """
    if groups == BatchNormGroups(1, 1):
        return model
    ranks = _process_group(groups.ranks_per_group) if groups.ranks_per_group > 1 else None

    def grouped(norm: _BatchNorm) -> nn.Module:
        if ranks is not None and device.type == "cuda":
            return nn.SyncBatchNorm.convert_sync_batchnorm(norm, ranks)
        return GroupedBatchNorm(norm, groups.groups_per_rank, ranks)

    return _replace(model, grouped)


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


class GroupedBatchNorm(_BatchNorm):
    """An `nn.BatchNorm{1,2,3}d` whose training statistics are those of each group; evaluation is unchanged.

    Args:
        norm: The batch norm whose weights and buffers it takes over.
        groups: Number of groups that the input is split into.
        ranks: The ranks whose inputs make one group, or None.
    """

    def __init__(self, norm: _BatchNorm, groups: int, ranks: dist.ProcessGroup | None) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight = norm.weight
        self.bias = norm.bias
        self.running_mean = norm.running_mean
        self.running_var = norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.groups = groups
        self.ranks = ranks

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [n, features, ...] by the mean and variance of each group, and update the running statistics."""
        if not self.training:
            return super().forward(input)
        normalize = self._split if self.ranks is None else self._normalize_across_ranks
        normalized, mean, variance = normalize(input)
        self._update_running_stats(mean, variance)
        return normalized

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept what the plain batch norm accepts."""

    def _split(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized input, and mean and variance [features] averaged over the groups."""
        parts = input.tensor_split(self.groups)
        means = input.new_zeros((len(parts), self.num_features), dtype=_dtype(input))
        variances = torch.zeros_like(means)
        normalized = [
            # A momentum of 1 leaves the group's own statistics in the buffers.
            batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(parts, means, variances, strict=True)
        ]
        return torch.cat(normalized), means.mean(0), variances.mean(0)

    def _normalize_across_ranks(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what `nn.SyncBatchNorm` does: the mean over all ranks first, then the squares around it.

        Returns the same as `_split`.
        """
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        size = dist.get_world_size(self.ranks)
        values = input.to(_dtype(input))
        mean = _Sum.apply(values.mean(axes), self.ranks) / size
        centred = values - mean.view(shape)
        variance = _Sum.apply(centred.square().mean(axes), self.ranks) / size
        normalized = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        n = size * values.numel() / self.num_features
        return normalized.to(input.dtype), mean.detach(), variance.detach() * (n / max(n - 1, 1))

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)


class _Sum(torch.autograd.Function):
    """Sums a tensor over ranks; backward sums the gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        total = value.clone()
        dist.all_reduce(total, group=ranks)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradients[0], ctx.ranks), None


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _replace(model: nn.Module, grouped: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """Replace each batch norm once, wherever it is used. A SyncBatchNorm of the model stays."""
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, _BatchNorm) or isinstance(module, nn.SyncBatchNorm):
            continue
        if type(module) not in PLAIN:
            raise UsageError(
                f"--norm-batch: this model's {type(module).__name__} is a batch norm of its own kind, which would be "
                "lost; use --norm-batch 0, which leaves it as it is"
            )
        if module not in replaced:
            replaced[module] = grouped(module)
        if not name:
            return replaced[module]
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).add_module(leaf, replaced[module])
    return model


def _coalesced(buffers: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Run a collective over all values at once, for each dtype, instead of once for each buffer."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        values = torch.cat([buffer.flatten() for buffer in same])
        collective(values)
        for buffer, part in zip(same, values.split([buffer.numel() for buffer in same]), strict=True):
            buffer.copy_(part.view_as(buffer))


def _dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of the statistics: fp32 at least, under autocast too."""
    return torch.promote_types(input.dtype, torch.float32)


def _process_group(size: int) -> dist.ProcessGroup:
    """Return this rank's group, of ranks that take neighbouring parts of the global batch."""
    ranks, _ = dist.new_subgroups(group_size=size)
    return ranks
