"""Batch norms with gradient accumulation: running statistics that any number of ranks agrees on, also compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_on_ecs.recipes.batch_norm import BatchNorms

BATCHES = [
    torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) * (1 + index) + index for index in range(4)
]
STEPS = 2


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def accumulate(model: nn.Module, compiled: Callable[[Tensor], Tensor], mine: list[Tensor]) -> BatchNorms:
    norms = BatchNorms(model, len(mine))
    for _ in range(STEPS):
        for batch in mine:
            norms.before_forward()
            compiled(batch).sum().backward()
        norms.after_step()
    return norms


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_step_moves_statistics_once(count: int) -> None:
    norm, separate = nn.BatchNorm1d(4), [nn.BatchNorm1d(4) for _ in range(count)]
    accumulate(norm, norm, BATCHES[:count])
    for each, batch in zip(separate, BATCHES, strict=False):
        for _ in range(STEPS):
            each(batch)
    for name, value in statistics(norm).items():
        torch.testing.assert_close(value, torch.stack([statistics(each)[name] for each in separate]).mean(0))
    assert norm.momentum == 0.1


def on_rank(rank: int, world_size: int, count: int) -> dict[str, Tensor]:
    norm = nn.BatchNorm1d(4)
    accumulate(norm, norm, BATCHES[:count][rank::world_size]).average_over_ranks(count)
    return statistics(norm)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_have_the_statistics_of_one(on_ranks: Any, count: int) -> None:
    [alone] = on_ranks(1, on_rank, count)
    for rank in on_ranks(2, on_rank, count):
        torch.testing.assert_close(rank, alone)


def test_norms_without_statistics_or_momentum_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, momentum=None))
    plain = nn.BatchNorm1d(4, momentum=None)
    accumulate(model, model, BATCHES)
    for _ in range(STEPS):
        for batch in BATCHES:
            plain(nn.BatchNorm1d(4)(batch))
    torch.testing.assert_close(model[1].running_mean, plain.running_mean)


def test_micro_batches_compile_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    plain.load_state_dict(model.state_dict())
    accumulate(model, torch.compile(model, backend="aot_eager"), BATCHES * 2)
    accumulate(plain, plain, BATCHES * 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(statistics(model), statistics(plain))
