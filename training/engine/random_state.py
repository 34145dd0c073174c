"""The random number generators of a process: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed(seed: int) -> None:
    """Seed all generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, the CUDA one of `device` included."""
    name, numbers, *rest = np.random.get_state()
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(numbers).tolist(), *rest),
        **cuda,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to a captured state."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
