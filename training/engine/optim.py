"""The optimizer and its schedule, for a global batch of any size."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from training.engine.config import TrainingConfig

REFERENCE_BATCH = 256
MOMENTUM = 0.9
ADAM_BETAS = (0.9, 0.999)  # PyTorch's
WARM_UP = 0.15


def peak_lr(config: TrainingConfig, global_batch: int) -> float:
    """Return the schedule's highest learning rate for a global batch of this many samples.

    SGD's follows the linear scaling rule, lr x global batch / 256 (Goyal et al. 2017, https://arxiv.org/abs/1706.02677);
    AdamW's the square root rule, since the size of its steps isn't the gradient's (Malladi et al. 2022,
    https://arxiv.org/abs/2205.10287).
    """
    ratio = global_batch / REFERENCE_BATCH
    return config.base_lr * (ratio if config.optimizer == "sgd" else math.sqrt(ratio))


def build(
    model: nn.Module, config: TrainingConfig, global_batch: int, total_steps: int
) -> tuple[Optimizer, LRScheduler]:
    """Build the model's optimizer and its one-cycle schedule (Smith 2018, https://arxiv.org/abs/1803.09820)."""
    lr = peak_lr(config, global_batch)
    optimizer = build_optimizer(model, config, lr)
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=total_steps, pct_start=WARM_UP, cycle_momentum=False)
    return optimizer, schedule


def build_optimizer(
    model: nn.Module, config: TrainingConfig, lr: float, betas: tuple[float, float] = ADAM_BETAS
) -> Optimizer:
    """Build the model's optimizer at a learning rate.

    Parameters of one dimension, which are biases and the weights of norms, don't decay. The config also decides whether
    the optimizer is fused when it loads a saved state. `betas` are AdamW's.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.decay},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = True if config.fused_optimizer == "on" else None  # None: PyTorch chooses between its other two
    optimizer: Optimizer
    if config.optimizer == "sgd":
        optimizer = SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=fused)
    else:
        optimizer = AdamW(groups, lr=lr, betas=betas, fused=fused)
    optimizer.register_load_state_dict_pre_hook(partial(_set_fused, fused))
    return optimizer


def _set_fused(fused: bool | None, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Replace the `fused` of a saved state: before it is loaded, because it decides where the state is kept."""
    return {**state, "param_groups": [{**group, "fused": fused} for group in state["param_groups"]]}
