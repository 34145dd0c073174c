"""The model on several ranks: a copy on each (DDP), or a share of each weight (FSDP2).

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.recipes.language.model import Fill, LanguageModel, ModelConfig


def build(
    config: ModelConfig, fill: Fill, device: torch.device, *, policy: MixedPrecisionPolicy | None, recompute: bool
) -> LanguageModel:
    """Build the model on its device, part by part: at no time does a rank have all weights if they are sharded.

    Args:
        config: Its shape.
        fill: Fills each parameter.
        device: The device.
        policy: The dtypes of a sharded model; None for a copy on each rank.
        recompute: Compute activations again in the backward pass.
    """
    with torch.device("meta"):
        model = LanguageModel(config, recompute=recompute)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),)) if policy else None
    for prefix, part in model.units():
        part.to_empty(device=device)
        for name, parameter in part.named_parameters():
            fill(prefix + name, parameter)
        if policy and mesh and prefix.startswith("blocks."):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    if policy and mesh:
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def mixed_precision(*, bf16: bool, bf16_gradients: bool) -> MixedPrecisionPolicy:
    """Return the dtypes of a sharded model: in which it computes, and in which ranks exchange gradients."""
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else torch.float32,
        reduce_dtype=torch.bfloat16 if bf16_gradients else torch.float32,
        cast_forward_inputs=False,  # the rotation's angles stay fp32
    )


def reshard(model: nn.Module) -> None:
    """Let go of what a sharded model has gathered of others' shares: without a backward pass it keeps some."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which each rank may have a share; if so, every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, limit: float) -> None:
    """Scale all gradients so that their norm, over all ranks, is at most `limit`; 0 leaves them."""
    if limit > 0:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def largest_weight(model: nn.Module) -> float:
    """Return the largest absolute value of any weight of any rank, not a number if one is none."""
    return float(whole(nn.utils.get_total_norm(cast(list[Tensor], list(model.parameters())), float("inf"))))
