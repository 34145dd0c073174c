"""The ranks of a training: their process group, their devices, and sums over all of them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """One rank of a training: its number, the number of all, and its device."""

    rank: int
    world_size: int
    device: torch.device


def start_ranks(timeout: timedelta = timedelta(hours=1)) -> Ranks:
    """Choose this rank's GPU, or the CPU, and join the process group, if there are several ranks.

    torchrun and `ray-on-ecs run` set the variables RANK, WORLD_SIZE and LOCAL_RANK; without them there is one rank.
    Tensors on a GPU use NCCL, those on the CPU Gloo.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", timeout=timeout)
    return Ranks(rank, world_size, device)


def end_ranks() -> None:
    """Wait for the other ranks, one of which may still write a file, and leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, which have one shape; the tensor itself is not changed."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def choice_of_rank_0(value: Any) -> Any:
    """Return the value of rank 0 on all ranks; the values of the others don't count."""
    chosen = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen)
    return chosen[0]


def largest_world_size() -> int:
    """Return the number of ranks that the run may have: of `--num-workers 1:4`, four."""
    return int(os.environ.get("MAX_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
