"""The loss among metrics, whoever logged them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def loss_name(metrics: Mapping[str, Any]) -> str | None:
    """Return the name of the training loss: that of a recipe, or the last of a script's that ends with `loss`."""
    if "train_loss" in metrics:
        return "train_loss"
    return next((name for name in reversed(list(metrics)) if name.endswith("loss")), None)


def loss_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the training loss; None where there is none, or it is no finite number."""
    name = loss_name(metrics)
    value = metrics[name] if name else None
    return value if isinstance(value, int | float) and math.isfinite(value) else None
