"""Gradient buckets of DistributedDataParallel after a resume, equal to the buckets of the uninterrupted run.

DDP groups gradients into buckets, and rebuilds the buckets after its first step, in the order in which the gradients
became ready. With three or more ranks the buckets decide the order of the floating-point additions, and so the last
bit. A process that resumes would use the initial buckets for one more step; replaying the order first avoids that.
https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# Prefixes in the names of parameters of torch.compile and of activation checkpointing.
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


class GradientOrder:
    """Order in which the gradients of the first backward pass become ready.

    Attributes:
        names: The parameters' names in that order; empty before the first step, and without DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._record, name))
            for name, parameter in _bucketed_parameters(model).items()
        ]

    def set(self, names: Sequence[str]) -> None:
        """Use the order of an earlier process, unless it is empty."""
        if names:
            self.stop()
            self.names = list(names)

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _record(self, name: str, parameter: Tensor) -> None:
        if name in self.names:  # another backward pass has begun
            self.stop()
        else:
            self.names.append(name)


def replay(model: nn.Module, names: Sequence[str]) -> None:
    """Make DDP rebuild its buckets before its first step in an order, by a backward pass through a sum of parameters.

    All gradients are deleted. It does nothing without DDP, and unless the names are those of all trained parameters.
    """
    parameters = _bucketed_parameters(model)
    if not names or parameters.keys() != set(names):
        return
    ddp = cast(DistributedDataParallel, without_compile(model))
    module = ddp.module
    ddp.module = _Sum([parameters[name] for name in names])
    try:
        ddp().backward()
    finally:
        ddp.module = module
    for parameter in parameters.values():
        parameter.grad = None


def _bucketed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, if the order of their gradients determines DDP's buckets.

    It does not with `find_unused_parameters`; a static graph records more than the order in its first step, and sparse
    gradients have separate buckets.
    """
    ddp = without_compile(model)
    if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
        return {}
    if any(getattr(module, "sparse", False) for module in ddp.modules()):
        return {}
    module = cast(nn.Module, ddp.module)
    return {plain_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class _Sum(nn.Module):
    """Sum of parameters, whose backward pass makes their gradients ready in the order of the list.

    Autograd runs backward from the last operation, so the parameters are added in reverse.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._summed = list(parameters)
        self.register_buffer("nothing", torch.zeros(1, device=parameters[0].device))  # DDP broadcasts the buffers

    def forward(self) -> Any:
        """Return the sum times zero."""
        total = torch.zeros((), device=self._summed[0].device)
        for parameter in reversed(self._summed):
            total = total + (parameter * 0).sum().float()
        return total


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
