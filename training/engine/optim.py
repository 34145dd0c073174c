"""The optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from training.engine.config import TrainingConfig


def build_optimizer(model: nn.Module, config: TrainingConfig, betas: tuple[float, float]) -> Optimizer:
    """Build the model's optimizer.

    Parameters of one dimension, which are biases and the weights of norms, don't decay. The config also decides whether
    the optimizer is fused when it loads a saved state. `betas` are AdamW's.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = True if config.fused_optimizer == "on" else None  # None: PyTorch chooses between its other two
    optimizer = AdamW(groups, lr=config.lr, betas=betas, fused=fused)
    optimizer.register_load_state_dict_pre_hook(partial(_set_fused, fused))
    return optimizer


def _set_fused(fused: bool | None, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Replace the `fused` of a saved state: before it is loaded, because it decides where the state is kept."""
    return {**state, "param_groups": [{**group, "fused": fused} for group in state["param_groups"]]}
