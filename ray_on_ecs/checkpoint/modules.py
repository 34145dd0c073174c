"""Modules and their tensors, by names without the wrappers of DDP, torch.compile and activation checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

# Prefixes in the names of parameters of torch.compile and of activation checkpointing.
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
# Types of the bits of numbers, by their bytes.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def key_of(prefix: str, name: str) -> str:
    """Return the key of a parameter or buffer in a checkpoint."""
    return f"{prefix}.{plain_name(name)}"


def named_parameters(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters by key, tied ones under each of their names, and as shards under FSDP2."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()  # after an evaluation the root has whole parameters
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield key_of(prefix, name), parameter


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sums of the bits of tensors on this rank, which hardly any change of their values keeps."""
    sums: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        if local.is_complex():
            local = torch.view_as_real(local)
        # Classes of quantized weights don't allow it, which are not trained.
        is_plain = type(local) is Tensor and local.itemsize in BITS
        sums[key] = local.view(BITS[local.itemsize]).sum(dtype=torch.int64) if is_plain else torch.tensor(0)
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    return dict(zip(sums, torch.stack([each.to(device) for each in sums.values()]).tolist(), strict=True))


def resize(prefix: str, module: nn.Module, saved: Mapping[str, Any], changed: Iterable[str]) -> None:
    """Give tensors without values, and changed ones, their form in a checkpoint; make or remove changed buffers."""
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    own = {key_of(prefix, name): tensor for name, tensor in named}
    owners = {key_of(prefix, name) if name else prefix: each for name, each in module.named_modules()}
    lazy = [key for key, value in own.items() if is_lazy(value) and key in saved]
    for key in {*changed, *lazy}:
        owner_key, _, name = key.rpartition(".")
        tensor, owner = own.get(key), owners.get(owner_key)
        if owner is None:
            continue
        if key not in saved:
            setattr(owner, name, None)
            continue
        size, dtype = saved[key].size, saved[key].properties.dtype
        if tensor is None:
            device = next((each.device for each in own.values()), None)
            owner.register_buffer(name, torch.empty(size, dtype=dtype, device=device))
        elif is_lazy(tensor):
            cast(Any, tensor).materialize(size, dtype=dtype)
        elif not isinstance(tensor, DTensor):
            tensor.data = torch.empty(size, dtype=dtype, device=tensor.device)
