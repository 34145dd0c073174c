"""Small training on Gloo with one slow rank, or healthy: `python slow_rank_script.py CASE SLOW SECONDS FOLDER`."""

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE, SLOW, SECONDS, FOLDER = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_SLOW = RANK == SLOW
PAUSE = 0.04
torch.set_num_threads(1)


class Model(nn.Module):
    """Two layers, with a pause of the slow rank where the case wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch).relu()
        if IS_SLOW and CASE == "forward":
            time.sleep(PAUSE)
        if IS_SLOW and CASE == "backward":
            hidden.register_hook(lambda gradient: time.sleep(PAUSE))
        return self.second(hidden)


def hog() -> None:
    """Take this rank's core away from it."""
    os.sched_setaffinity(0, {0 if IS_SLOW else 1})
    for _ in range(6 if IS_SLOW else 0):
        multiprocessing.get_context("spawn").Process(target=_spin, args=(os.getpid(),), daemon=True).start()


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))


def throttle() -> None:
    """Stop this process for most of the time."""
    if IS_SLOW and not os.fork():
        parent = os.getppid()
        while os.getppid() == parent:
            os.kill(parent, signal.SIGSTOP)
            time.sleep(20 * PAUSE)
            os.kill(parent, signal.SIGCONT)
            time.sleep(PAUSE)
        os._exit(0)


def write(size: int) -> None:
    """Write a file that is on the disk afterwards."""
    with (FOLDER / f"file-{RANK}").open("wb") as file:
        file.write(bytes(size))
        os.fsync(file.fileno())


def log() -> None:
    """Log each weight, as a debug level that was left on does."""
    with (FOLDER / f"log-{RANK}").open("w") as file:
        for number in range(4000):
            print(f"{time.time()} rank {RANK} weight {number} {number / 7:.6f} {number / 3:.6f}", file=file, flush=True)


def checkpoint(model: nn.Module) -> None:
    """Save what only this rank saves, and wait for a slow storage."""
    torch.save(model.state_dict(), FOLDER / f"model-{RANK}")
    time.sleep(PAUSE)


# What the slow rank does in each step, beside those of the model.
BEFORE_STEP: dict[str, Callable[[int], object]] = {
    "loader": lambda step: time.sleep(PAUSE),
    "garbage": lambda step: gc.collect(),
    "logging": lambda step: log(),
    "disk": lambda step: [write(2**22) for _ in range(4)],
}
# What healthy ranks do.
BEFORE_HEALTHY_STEP: dict[str, Callable[[int], object]] = {
    "jitter": lambda step: time.sleep(random.random() * 0.03),
    "one at random": lambda step: time.sleep(PAUSE * (random.Random(step).randrange(SIZE) == RANK)),
    "validation": lambda step: time.sleep(1.5 * (RANK == 0 and step % 200 == 199)),
    "one pause": lambda step: time.sleep(8.0 * (RANK == 0 and step == 50)),
    # Not right after a broadcast, whose tensor a thread of Gloo frees: the child of CPython 3.11 may then wait forever
    # for a lock of the interpreter, which this thread held.
    "forks": lambda step: step % 20 != 5 or os.waitpid(os.fork() or os._exit(0), 0),
}


def ddp() -> None:
    """Train data-parallel."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    objects = [[number] for number in range(100_000)] if IS_SLOW and CASE == "garbage" else []
    batch = torch.ones(512 if IS_SLOW and CASE == "batch" else 64, 256)
    repeats = 8 if IS_SLOW and CASE == "batch" else 1
    for step in steps():
        if IS_SLOW:
            BEFORE_STEP.get(CASE, bool)(step)
        BEFORE_HEALTHY_STEP.get(CASE, bool)(step)
        for repeat in range(repeats):
            with model.no_sync() if repeat + 1 < repeats else torch.enable_grad():
                model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if IS_SLOW and CASE == "checkpoint":
            checkpoint(model)
    del objects


def steps(group: dist.ProcessGroup | None = None) -> Iterator[int]:
    """Yield the steps until the time is over, by the clock of one rank, or a file says so."""
    end, step, is_over = time.time() + SECONDS, 0, torch.zeros(1)
    while True:
        yield step
        step += 1
        is_over[0] = time.time() > end or (FOLDER / "over").exists()
        if step % 10 == 0:
            dist.broadcast(is_over, 0, group=group)
            if is_over[0]:
                return


def tensor_parallel() -> None:
    """Train in pairs of ranks that are replicas of each other."""
    pairs: Any = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]
    replicas: Any = [dist.new_group(list(range(first, SIZE, 2))) for first in range(2)]
    value = torch.ones(1000)
    for _ in steps():
        since = time.monotonic()
        for _ in range(4):
            dist.all_reduce(value, group=pairs[RANK // 2])
            value /= 2
        load(since)
        dist.all_reduce(value, group=pairs[RANK // 2])
        dist.all_reduce(value, group=replicas[RANK % 2])
        value.fill_(1.0)


def load(since: float) -> None:
    """Take as long as the rest of the step, which is longer on a busy machine."""
    if IS_SLOW and CASE.endswith(" loader"):
        time.sleep(max(time.monotonic() - since, PAUSE))


def sharded() -> None:
    """Gather and scatter for each of twenty layers, as FSDP does."""
    shard, whole = torch.ones(1000), torch.ones(1000 * SIZE)
    since = time.monotonic()
    for _ in steps():
        load(since)
        since = time.monotonic()
        for _ in range(20):
            dist.all_gather_into_tensor(whole, shard)
        for _ in range(20):
            dist.reduce_scatter_tensor(shard, whole)
            shard.fill_(1.0)


def pipeline() -> None:
    """Pass a batch from stage to stage, the last of which takes the longest by design."""
    value = torch.ones(1000)
    for _ in steps():
        if RANK:
            dist.recv(value, RANK - 1)
        time.sleep(0.02 if RANK == SIZE - 1 else 0.005)
        if RANK < SIZE - 1:
            dist.send(value, RANK + 1)
        dist.all_reduce(value)
        value.fill_(1.0)


def barriers() -> None:
    """Do the work of each rank alone, and meet."""
    for _ in steps():
        time.sleep(0.01)
        dist.barrier()


def groups() -> None:
    """Use several groups, some of which not all ranks join, and make the default one again."""
    first: Any = dist.new_group([0, 1])
    value = torch.ones(10)
    for step in steps():
        dist.all_reduce(value)
        if RANK < 2 and step % 3 == 0:
            dist.all_reduce(value, group=first)
        value.fill_(1.0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/again", rank=RANK, world_size=SIZE)
    for _ in range(300):
        dist.all_reduce(value)
        value.fill_(1.0)


def loader_processes() -> None:
    """Train with forked workers of a DataLoader."""
    data = torch.utils.data.TensorDataset(torch.ones(512, 256))
    model = DistributedDataParallel(Model())
    for _ in steps():
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=64, num_workers=1):
            model(batch).mean().backward()


KINDS: dict[str, Callable[[], None]] = {
    "tensor parallel": tensor_parallel,
    "tensor parallel loader": tensor_parallel,
    "sharded": sharded,
    "sharded loader": sharded,
    "pipeline": pipeline,
    "barriers": barriers,
    "groups": groups,
    "loader processes": loader_processes,
}


def main() -> None:
    """Train for some seconds."""
    if CASE == "alone":
        time.sleep(SECONDS)
        return
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=SIZE)
    if CASE in ("hog", "throttled"):
        {"hog": hog, "throttled": throttle}[CASE]()
    KINDS.get(CASE, ddp)()
    dist.destroy_process_group()
    os._exit(0)  # else a thread of Gloo may end the process by an error, with and without the reader


if __name__ == "__main__":
    main()
