"""The optimizer and its schedule, for a global batch of any size."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from training.engine.config import TrainingConfig

REFERENCE_BATCH = 256
MOMENTUM = 0.9
WARM_UP = 0.15


def peak_lr(config: TrainingConfig, global_batch: int) -> float:
    """The schedule's highest learning rate for so many images a step.

    SGD's follows the linear scaling rule, lr x global batch / 256 (Goyal et al. 2017, https://arxiv.org/abs/1706.02677);
    AdamW's the square root rule, since the size of its steps isn't the gradient's (Malladi et al. 2022,
    https://arxiv.org/abs/2205.10287).
    """
    ratio = global_batch / REFERENCE_BATCH
    return config.base_lr * (ratio if config.optimizer == "sgd" else math.sqrt(ratio))


def build(
    model: nn.Module, config: TrainingConfig, global_batch: int, total_steps: int
) -> tuple[Optimizer, LRScheduler]:
    """The model's optimizer, and the one-cycle schedule (Smith 2018, https://arxiv.org/abs/1803.09820) of its steps.

    Weights of one dimension, which are biases and norms', don't decay.
    """
    weights = list(model.parameters())
    groups = [
        {"params": [each for each in weights if each.dim() > 1], "weight_decay": config.decay},
        {"params": [each for each in weights if each.dim() <= 1], "weight_decay": 0.0},
    ]
    lr = peak_lr(config, global_batch)
    fused = True if config.fused_optimizer == "on" else None  # False would also be the slowest of the others
    optimizer: torch.optim.Optimizer = (
        SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=fused)
        if config.optimizer == "sgd"
        else AdamW(groups, lr=lr, fused=fused)
    )
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=total_steps, pct_start=WARM_UP, cycle_momentum=False)
    return optimizer, schedule
