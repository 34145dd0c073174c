"""Bandwidth of the network between GPUs or nodes: all-reduce, all-gather and reduce-scatter in plain PyTorch.

    ray-on-ecs recipe copy network_bench
    ray-on-ecs run --num-workers 16 network_bench.py
    torchrun --nproc-per-node 2 network_bench.py --max-mib 64

NCCL on GPUs, Gloo on CPUs. For each collective and size rank 0 prints the mean time, and the algorithm and bus
bandwidth in GB/s (10^9 bytes), by the formulas of nccl-tests, with whose numbers they can be compared:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. network.png shows the bus bandwidth by size. It is
what each node sends if NCCL takes rings, as with --env NCCL_ALGO=Ring. By trees, which NCCL often takes for all-reduce
on two nodes, a node sends less, so the bus bandwidth may be higher than that of the network.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ray_on_ecs import log, progress
from ray_on_ecs.recipes.options import Options, fail, whole

MIB = 2**20
# Bus bandwidth over algorithm bandwidth, for n ranks.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = Options(__doc__)
    add = parser.add_argument
    largest = 1024 if torch.cuda.is_available() else 64
    add("--min-mib", type=whole(), default=1, metavar="MIB", help="smallest size; each next is twice as large")
    add("--max-mib", type=whole(), default=largest, metavar="MIB", help="largest size (1024 on GPUs, 64 on CPUs)")
    add("--times", type=whole(), default=10, metavar="N", help="measured collectives of each size (%(default)s)")
    args = parser.parse_args()
    if args.min_mib > args.max_mib:
        fail(f"argument --min-mib: {args.min_mib} is more than --max-mib {args.max_mib}")
    return args


def collective(name: str, size: int, device: torch.device) -> Callable[[], object]:
    """Return a collective of so many bytes: the whole of what is reduced, or the whole of what is gathered."""
    if name == "all_reduce":
        whole = torch.zeros(size // 4, device=device)
        return lambda: dist.all_reduce(whole)
    ranks = dist.get_world_size()
    share = torch.zeros(max(size // 4 // ranks, 1), device=device)
    whole = share.repeat(ranks)
    if name == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before PyTorch 2.14
        return lambda: gather(whole, share)
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce(share, whole)


def seconds_of(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the mean seconds of a collective, on the slowest rank, after one that makes the connections."""
    call()
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    taken = torch.tensor([(time.perf_counter() - began) / times], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw(sizes: list[int], curves: dict[str, list[float]], title: str) -> None:
    """Draw the bus bandwidth by size into network.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(sizes, values, marker="o", label=name)
    axes.set(title=title, xlabel="MiB", ylabel="bus bandwidth in GB/s", xscale="log", ylim=(0, None))
    axes.legend()
    figure.savefig("network.png", dpi=120)


def main() -> None:
    """Measure all sizes of each collective."""
    args = parse()
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1}
    rank, local_rank, ranks, nodes = (int(os.environ.get(name, default)) for name, default in defaults.items())
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    # Without a launcher, one rank by itself.
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if use_gpu else "gloo", **alone)
    title = f"{'NCCL' if use_gpu else 'Gloo'}, {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    sizes = [args.min_mib * 2**power for power in range((args.max_mib // args.min_mib).bit_length())]
    curves: dict[str, list[float]] = {name: [] for name in FACTORS}
    if rank == 0:
        print(f"{title}\n{'collective':<15}{'MiB':>6}{'ms':>12}{'algbw':>10}{'busbw':>10}", flush=True)
    for step, size in enumerate(sizes, 1):
        for name, factor in FACTORS.items():
            seconds = seconds_of(collective(name, size * MIB, device), args.times, device)
            algbw = size * MIB / seconds / 1e9
            curves[name].append(algbw * factor(ranks))
            if rank == 0:
                print(f"{name:<15}{size:>6}{1000 * seconds:>12.3f}{algbw:>10.2f}{curves[name][-1]:>10.2f}", flush=True)
        progress(step, len(sizes))
        log(mib=size, **{f"{name}_busbw_gb": values[-1] for name, values in curves.items()})
    if rank == 0:
        draw(sizes, curves, title)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
