"""The ranks of a training: their process group, devices and CPUs, and sums and means over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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
    rank, world_size = rank_in_environment(), int(os.environ.get("WORLD_SIZE", "1"))
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", timeout=timeout)
    return Ranks(rank, world_size, device)


def rank_in_environment() -> int:
    """Return the number of this rank, also before `start_ranks` and after `end_ranks`."""
    return int(os.environ.get("RANK", "0"))


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


def choice_of_rank_0(choose: Callable[[], Any]) -> Any:
    """Return the result of a function on all ranks; rank 0 alone calls it."""
    if not dist.is_initialized():
        return choose()
    chosen = [choose() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def largest_world_size() -> int:
    """Return the number of ranks that the run may have: of `--num-workers 1:4`, four."""
    return int(os.environ.get("MAX_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs that this process may use: those of its affinity, or the limit of its container if that is less.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    folder = root / "sys/fs/cgroup"
    for files in ([folder / "cpu.max"], [folder / f"cpu/cpu.cfs_{name}_us" for name in ("quota", "period")]):
        try:
            quota, period = " ".join(file.read_text() for file in files).split()
            cpus = min(cpus, int(quota) / int(period)) if int(quota) > 0 else cpus
        except (OSError, ValueError):  # no such file, or "max": not limited
            continue
    return max(1, int(cpus))


class EpochMeans:
    """Means over an epoch's samples on all ranks, such as of the loss; a checkpoint has the sums of all ranks.

    Args:
        device: The device of the added tensors; nothing waits for it before the end of the epoch.
        names: Names of the added values.
    """

    def __init__(self, device: torch.device, *names: str) -> None:
        self._names = names
        self._sums = torch.zeros(len(names) + 1, device=device, dtype=torch.float64)

    def add(self, samples: int, **means: Tensor) -> None:
        """Add a batch of this rank: its number of samples, and each value's mean over them."""
        for index, name in enumerate(self._names):
            self._sums[index] += means[name].detach() * samples
        self._sums[-1] += samples

    def end(self, prefix: str = "") -> dict[str, float]:
        """Return the means over all ranks by their names with a prefix, and reset the sums."""
        *sums, samples = sum_over_ranks(self._sums).tolist()
        self._sums.zero_()
        return {f"{prefix}{name}": each / samples for name, each in zip(self._names, sums, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, which all have to call this."""
        return {"sums": sum_over_ranks(self._sums).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from sums, on any number of ranks."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._sums.copy_(self._sums.new_tensor(state["sums"]) / world_size)
