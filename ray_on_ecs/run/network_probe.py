"""Measurement of a network: all-reduces of all ranks; it needs PyTorch and the standard library only.

usage: python -P network_probe.py HOST PORT RANK RANKS LOCAL_RANK BYTES, with LOCAL_RANK -1 for CPUs. Rank 0 serves the
store at HOST:PORT. The last line of the output has the seconds of an all-reduce.
"""

from __future__ import annotations

import socket
import sys
import time

import torch
import torch.distributed as dist

TIMES = 3
LONG_SECONDS = 1.0  # so long, one all-reduce is exact enough


def measure(host: str, port: int, rank: int, ranks: int, local_rank: int, size: int) -> float:
    """Return the mean seconds of an all-reduce of so many bytes, after a small one that makes the connections."""
    listener = None
    if rank == 0:  # on one address only, as PyTorch's store asks for no password
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family).detach()
    store = dist.TCPStore(host, port, ranks, rank == 0, master_listen_fd=listener)
    device = torch.device("cpu")
    if local_rank >= 0:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if local_rank < 0 else "nccl", store=store, rank=rank, world_size=ranks)
    data = torch.zeros(size // 4, device=device)
    seconds_of(data[: len(data) // 16], 1)
    seconds = seconds_of(data, 1)
    if rank == 0:  # for all ranks, which take part in the same ones
        store.set("is long", str(seconds > LONG_SECONDS))
    if store.get("is long") == b"False":
        seconds = seconds_of(data, TIMES)
    dist.destroy_process_group()
    return seconds


def seconds_of(data: torch.Tensor, times: int) -> float:
    """Return the mean seconds of so many all-reduces."""
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    taken = measure(address, *map(int, numbers))
    print("seconds of an all-reduce:", taken, flush=True)
