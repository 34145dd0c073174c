"""Random number generators of a process: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


def capture(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the states of all generators, on the CPU and on some CUDA devices."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices]
    numpy = sys.modules.get("numpy")
    if numpy:  # a script that has not imported it does not depend on its state
        state["numpy"] = numpy.random.get_state()
    return state


def restore(state: dict[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Restore the generators to captured states, with the CUDA devices in the same order."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for device, cuda_state in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, device)
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
