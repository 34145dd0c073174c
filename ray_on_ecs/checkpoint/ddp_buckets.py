"""The buckets of DistributedDataParallel after a resume: filled in the same order as without the interruption.

DDP groups gradients into buckets, and after its first step groups them again in the order in which they were ready. On
three or more ranks the buckets decide in which order numbers are added, and so the last digit. A process that resumes
would use the first buckets for one more step: it is given the order first.
https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ray_on_ecs.checkpoint.modules import plain_name, without_compile


class GradientOrder:
    """Notes the order in which the gradients of the first backward pass are ready.

    Args:
        model: The module under DDP; another one has no order.

    Attributes:
        names: The parameters' names in that order, nothing before the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in _ordered(model).items()
        ]

    def set(self, names: Sequence[str]) -> None:
        """Take over the order of an earlier process, if it knew one."""
        if names:
            self.stop()
            self.names = list(names)

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note(self, name: str, parameter: Tensor) -> None:
        if name in self.names:  # another backward pass has begun
            self.stop()
        else:
            self.names.append(name)


def replay(model: nn.Module, names: Sequence[str]) -> None:
    """Let DDP see gradients in an order, by a backward pass through a sum of its parameters; deletes all gradients.

    Args:
        model: The module under DDP, before its first step; nothing is done with another one.
        names: The parameters' names in the order; nothing is done unless these are all that are trained.
    """
    parameters = _ordered(model)
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


def _ordered(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, if the order of their gradients decides on DDP's buckets.

    It does not with unused parameters to be found; a static graph takes more than the order from its first step, and
    sparse gradients have a bucket for themselves.
    """
    ddp = without_compile(model)
    if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
        return {}
    if any(getattr(each, "sparse", False) for each in ddp.modules()):
        return {}
    module = cast(nn.Module, ddp.module)
    return {plain_name(name): each for name, each in module.named_parameters() if each.requires_grad}


class _Sum(nn.Module):
    """A sum of parameters whose backward pass makes their gradients ready in the order of the list.

    Autograd goes from the last operation to the first, so the last one's parameter is the first to be ready.
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
