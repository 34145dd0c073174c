"""A small training with a Checkpointer, as a user's script has it, on one rank or on several."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ray_on_ecs import Checkpointer, DistributedSampler

SAMPLES = 96
BATCH = 12  # of all ranks
STEPS_PER_EPOCH = SAMPLES // BATCH
STEPS = 20


class Network(nn.Module):
    """A perceptron with dropout and batch statistics; DDP has several buckets for it."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        hidden = 700
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Dropout(dropout))
        self.norm = nn.BatchNorm1d(hidden) if dropout else nn.Identity()
        self.head = nn.Linear(hidden, 1)
        self.frozen = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x))) + self.frozen(x)


def wrapped(kind: str, network: Network) -> nn.Module:
    """Return the network under DDP or FSDP2, or as it is."""
    if kind == "ddp":
        return DistributedDataParallel(network, bucket_cap_mb=1)
    if kind == "fsdp":
        fully_shard(network.layers)
        fully_shard(network)
    return network


class Stateful:
    """An object whose state is a value of any class."""

    def __init__(self, value: object = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@torch.no_grad()
def validate(model: nn.Module, inputs: Tensor) -> float:
    """Return the mean loss; every rank computes the same one."""
    model.eval()
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).item()
    model.train()
    return loss


def train(
    rank: int,
    ranks: int,
    folder: str | Path,
    kind: str = "ddp",
    end: int | None = None,
    *,
    begin: Callable[[], None] = lambda: None,
    dropout: float = 0.1,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end, or leave after a step as a killed process does; returns the weights and the samples by step.

    `begin` is called in the rank's process before anything else.
    """
    begin()
    torch.manual_seed(rank)
    network = Network(dropout)
    if kind != "ddp":  # which itself makes all ranks begin alike
        torch.manual_seed(0)
        network = Network(dropout)
        torch.manual_seed(rank)
    model = wrapped(kind, network)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)

    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    checkpoint = Checkpointer(
        folder, model=model, optimizer=optimizer, state={"schedule": schedule, "sampler": sampler}, **options
    )
    with redirect_stdout(io.StringIO()) as said:
        resumed = checkpoint.resume()
    used: dict[int, list[int]] = {}
    while checkpoint.step < STEPS and not checkpoint.should_stop:
        for x, y, numbers in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            used[checkpoint.step] = numbers.tolist()
            if checkpoint.after_step(samples=len(x) * ranks, loss=loss) or checkpoint.step in (end, STEPS):
                break
        else:
            checkpoint.end_epoch(val_loss=validate(model, inputs))
        if checkpoint.step == end:
            break
    if end is None:
        checkpoint.close()
    else:
        checkpoint.wait()  # the process is killed after the save, not in it
    full = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ranks > 1:
        dist.barrier()
    return {
        "weights": full,
        "used": used,
        "resumed": resumed,
        "said": said.getvalue(),
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "should_stop": checkpoint.should_stop,
    }


def difference(first: Any, second: Any, path: str = "") -> str | None:
    """Return the first place where two values differ in a bit, or None."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return f"{path}: {sorted(map(str, first))} and {sorted(map(str, second))}"
        return next(filter(None, (difference(first[key], second[key], f"{path}.{key}") for key in first)), None)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return next(filter(None, (difference(*pair, f"{path}.{number}") for number, pair in pairs)), None)
    if isinstance(first, Tensor | np.ndarray) and type(first) is type(second):
        is_equal = first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    else:
        is_equal = type(first) is type(second) and first == second
    return None if is_equal else f"{path}: {first!r} and {second!r}"
