"""Time of a step while its process reads the collectives, by which slow ranks are named, beside one without.

With Gloo on two CPU workers; on a machine with a GPU also with NCCL on one, whose counters are read more often.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import harness
from bench.harness import Bench
from bench.report import Comparison, at_most, spread
from ray_on_ecs.run import flight_recorder
from ray_on_ecs.run.nccl_interface import FLIGHT_RECORDER

NAME = "a step with the reader of the collectives"
PAIRS = 30
BLOCK_SECONDS = 2 * flight_recorder.READ_SECONDS
LAYERS, WIDTH, BATCH = 8, 256, 64
TARGET = 1.01
# Of a step in each block, without the reader and with it.
Seconds = dict[bool, list[float]]


def measure(bench: Bench, pairs: int = PAIRS) -> list[Comparison]:
    """Time blocks of steps, in turns."""
    os.environ[FLIGHT_RECORDER[0]] = FLIGHT_RECORDER[1]  # of this process and its children
    bench.log("slow ranks: gloo")
    seconds = harness.on_two_workers(time_steps, torch.device("cpu"), pairs)
    rows = [compare("Gloo, two workers", seconds)]
    if torch.cuda.is_available():
        bench.log("slow ranks: nccl")
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
            rows.append(compare("NCCL, one GPU", time_steps(torch.device("cuda", 0), pairs)))
            dist.destroy_process_group()
    return rows


def compare(where: str, seconds: Seconds) -> Comparison:
    """Compare the times of a step; the ratio is the median of the pairs' ratios."""
    ratios = [with_it / without for without, with_it in zip(seconds[False], seconds[True], strict=True)]
    milliseconds = {is_read: [1000 * each for each in times] for is_read, times in seconds.items()}
    return Comparison(
        name=NAME,
        reference=f"without: {spread(milliseconds[False])} ms",
        ours=f"with: {spread(milliseconds[True])} ms",
        ratio=statistics.median(ratios),
        target=at_most(statistics.median(ratios), TARGET),
        n=len(ratios),
        note=f"{where}, DistributedDataParallel, {LAYERS} layers of {WIDTH}, {BATCH} samples a step",
        data={"ratios": ratios, "milliseconds": {"without": milliseconds[False], "with": milliseconds[True]}},
    )


def time_steps(device: torch.device, pairs: int) -> Seconds:
    """Return the seconds of a step in each block, without the reader and with it; called on every rank."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH, device=device)

    def block(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        batch.sum().item()  # waits for the GPU
        return (time.perf_counter() - began) / steps

    block(100)
    steps = torch.tensor(int(BLOCK_SECONDS / block(100)) + 1, device=device)
    dist.broadcast(steps, 0)
    seconds: Seconds = {False: [], True: []}
    with reader():
        for number in range(2 * pairs):
            is_read = number % 4 in (1, 2)  # in turn first and second, as a machine gets slower or faster
            with nullcontext() if is_read else flight_recorder._lock:
                dist.barrier()
                seconds[is_read].append(block(int(steps)))
    return seconds


@contextmanager
def reader() -> Generator[None]:
    """Read the collectives as a script's process does under `ray-on-ecs run`, except where its lock is held."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=flight_recorder._run, args=(folder, stop))
        thread.start()
        try:
            yield
            if not thread.is_alive() or not list(Path(folder).glob(flight_recorder.FILES.format("*"))):
                raise harness.BenchmarkError("the collectives were not read")
        finally:
            stop.set()
            thread.join()
