"""The random number generators of a process: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# What a derived seed is for: the same numbers give another seed for each purpose.
SHUFFLE = 0
RANK = 1


def derive_seed(seed: int, purpose: int, number: int) -> int:
    """Return a seed (32 bits) that is as good as independent of those of other seeds, purposes and numbers.

    A sum would not be: rank 1 of seed 0 would draw what rank 0 of seed 1 does, and of larger seeds PyTorch's generator
    on CPUs takes the lower 32 bits alone.
    """
    return int(np.random.SeedSequence([seed, purpose, number]).generate_state(1)[0])


def seed_all(seed: int) -> None:
    """Seed PyTorch's, Python's and NumPy's generators with a number of 32 bits."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


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
