"""Batch norm over the same images whatever the number of workers.

The statistics of batch norm are part of what is computed: a model that normalizes 32 images together learns another
curve than one that takes 256, and with plain DDP that number follows from the number of workers. Here the images of a
step are normalized in groups of one size: a worker that has more splits its batch ("ghost batch norm", Hoffer et al.
2017, https://arxiv.org/abs/1705.08741), and workers that have fewer pool theirs, as SyncBatchNorm does; that has no CPU
version. Where a worker's batch is one group, its batch norm is torch's own and nothing is sent.

Weights and buffers have the names and meanings of `nn.BatchNorm*d`: a state_dict loads into the plain model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from training.errors import UsageError

# What is replaced: a subclass may do more than its name says.
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class BatchNormGroups:
    """How one worker's batch is normalized: in `split` parts, or as one part with those of `team` workers."""

    split: int
    team: int

    @classmethod
    def for_run(cls, batch_size: int, norm_batch: int, world_size: int) -> BatchNormGroups:
        """BatchNormGroups of `norm_batch` images where they come out even, else of nearly as many, not more.

        Teams are of one size, so it divides `world_size`, and no part is a single image, which has no variance. A
        `norm_batch` of 0 leaves each worker its own.
        """
        if not norm_batch:
            return cls(1, 1)
        if batch_size >= norm_batch:
            return cls(min(math.ceil(batch_size / norm_batch), max(batch_size // 2, 1)), 1)
        return cls(1, max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * batch_size <= norm_batch))


def group(model: nn.Module, groups: BatchNormGroups) -> nn.Module:
    """The model with its batch norms over these groups; every rank must call it, for teams are made.

    Raises:
        UsageError: A batch norm of the model does something else as well, which would be lost.
    """
    if groups == BatchNormGroups(1, 1):
        return model
    team = _team(groups.team) if groups.team > 1 else None
    replaced: dict[nn.Module, GroupedBatchNorm] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, _BatchNorm) or isinstance(module, nn.SyncBatchNorm):
            continue  # SyncBatchNorm is told already whom to share with
        if type(module) not in PLAIN:
            raise UsageError(
                f"--norm-batch: this model's {type(module).__name__} is a batch norm of its own kind, which can't be "
                "told what to normalize together; --norm-batch 0 leaves it as it is, over each worker's images"
            )
        if module not in replaced:
            replaced[module] = GroupedBatchNorm(module, groups.split, team)
        if not name:
            return replaced[module]
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).add_module(leaf, replaced[module])
    return model


def sync_buffers(model: nn.Module) -> None:
    """Give every rank the same buffers: of running statistics the ranks' mean, which is that of all groups.

    A running average is linear in what it averages, so the mean of the ranks' is what one worker would have had. Other
    buffers become rank 0's.
    """
    if not dist.is_initialized():
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    running = {id(each) for norm in norms for each in (norm.running_mean, norm.running_var)}
    for buffer in model.buffers():
        if id(buffer) in running:
            buffer /= dist.get_world_size()
            dist.all_reduce(buffer)
        else:
            dist.broadcast(buffer, src=0)


class GroupedBatchNorm(_BatchNorm):
    """Batch norm of 1, 2 or 3 dimensions, over groups of images while it trains, and as ever when it doesn't.

    Takes [n, features, ...] and gives as much.
    """

    def __init__(self, norm: _BatchNorm, split: int, team: dist.ProcessGroup | None) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.split, self.team = split, team

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each group by its own mean and variance, and note their average over this rank's groups."""
        if not self.training:
            return super().forward(input)
        normalize = self._split if self.team is None else self._normalize_across_ranks
        normalized, mean, variance = normalize(input)
        self._note(mean, variance)
        return normalized

    def _check_input_dim(self, input: Tensor) -> None:
        """What the plain batch norm accepts is accepted."""

    def _split(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = input.tensor_split(self.split)
        means = input.new_zeros((len(parts), self.num_features), dtype=_dtype(input))
        variances = torch.zeros_like(means)
        normalized = [
            # A momentum of 1 leaves the group's own statistics in the buffers.
            batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(parts, means, variances, strict=True)
        ]
        return torch.cat(normalized), means.mean(0), variances.mean(0)

    def _normalize_across_ranks(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As torch's SyncBatchNorm, with collectives that CPUs have too: the mean first, then the squares around it."""
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        members = dist.get_world_size(self.team)
        values = input.to(_dtype(input))
        mean = _Sum.apply(values.mean(axes), self.team) / members
        centred = values - mean.view(shape)
        variance = _Sum.apply(centred.square().mean(axes), self.team) / members
        normalized = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        n = members * values.numel() / self.num_features
        return normalized.to(input.dtype), mean.detach(), variance.detach() * (n / max(n - 1, 1))

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)


class _Sum(torch.autograd.Function):
    """The sum of a team's tensors, on each of its ranks; a gradient is what all of them make of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, team: dist.ProcessGroup) -> Tensor:
        ctx.team = team
        total = value.clone()
        dist.all_reduce(total, group=team)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradients[0], ctx.team), None


def _dtype(input: Tensor) -> torch.dtype:
    """Statistics are fp32 at least, under autocast too."""
    return torch.promote_types(input.dtype, torch.float32)


def _team(size: int) -> dist.ProcessGroup:
    """This rank's team, of ranks that take neighbouring parts of the global batch."""
    team, _ = dist.new_subgroups(group_size=size)
    return team
