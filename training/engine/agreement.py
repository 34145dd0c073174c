"""What the ranks of a run must have in common before they train."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_rank_zero(value: T, device: torch.device) -> T:
    """Return rank 0's value on every rank, all of which must call it."""
    if not dist.is_initialized():
        return value
    objects = [value]
    _use(device)
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def is_alike(value: Any, device: torch.device) -> bool:
    """Return whether every rank has the same value; all of them must call it."""
    if not dist.is_initialized():
        return True
    found: list[Any] = [None] * dist.get_world_size()
    _use(device)
    dist.all_gather_object(found, value)
    return len(set(found)) == 1


def _use(device: torch.device) -> None:
    """Let NCCL's collectives on objects use this device, as they use the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
