"""Modules and parameter names without the wrappers of DDP, torch.compile and activation checkpointing."""

from __future__ import annotations

import re
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Prefixes in the names of parameters of torch.compile and of activation checkpointing.
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


def without_compile(module: nn.Module) -> nn.Module:
    """Return a module without torch.compile."""
    original = getattr(module, "_orig_mod", None)
    return without_compile(original) if isinstance(original, nn.Module) else module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without DDP and torch.compile."""
    module = without_compile(module)
    if isinstance(module, DistributedDataParallel):
        return without_compile(cast(nn.Module, module.module))
    return module


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return WRAPPERS.sub("", name)
