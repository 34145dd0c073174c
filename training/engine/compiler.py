"""The compiler that torch.compile calls."""

from __future__ import annotations

import os
import shutil

import torch

from ray_on_ecs.errors import UsageError


def check_compiler(device: torch.device) -> None:
    """Raise UsageError unless there is the compiler that torch.compile calls: of C for GPUs, of C++ for CPUs."""
    variable = "CXX"
    usual = ("c++", "g++", "clang++")
    if device.type == "cuda":
        variable = "CC"
        usual = ("cc", "gcc", "clang")
    if not any(shutil.which(name) for name in (os.environ.get(variable, ""), *usual)):
        raise UsageError(
            f"--compile: 'on' needs a compiler ({', '.join(usual)}), and there is none; leave it off, or install one"
        )
