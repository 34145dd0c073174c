"""Micro-batches: any number of ranks has the gradients of the mean loss over the global batch."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ray_on_ecs import DistributedSampler, microbatches
from tests.training.ranks import Ranks

GLOBAL_BATCH = 10
STEPS = 6


def train(rank: int, ranks: int, kind: str, size: int | None) -> dict[str, Any]:
    """Train some steps of global batches; returns the weights."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model: nn.Module = network
    if kind == "ddp" and ranks > 1:
        model = DistributedDataParallel(network)
    elif kind == "fsdp" and ranks > 1:
        model = cast(nn.Module, fully_shard(network))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(GLOBAL_BATCH * STEPS, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.prod(1, keepdim=True))
    for batch in DataLoader(data, batch_sampler=DistributedSampler(data).batches(GLOBAL_BATCH)):
        for (x, y), weight in microbatches(batch, GLOBAL_BATCH, size=size, model=model):
            (weight * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [None, 2, 3])
def test_the_weights_are_those_of_one_rank(on_ranks: Ranks, kind: str, size: int | None) -> None:
    [whole] = on_ranks(1, train, kind, None)
    for ranks in (2, 3):
        for weights in on_ranks(ranks, train, kind, size):
            for name, value in weights.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "batch",
    [torch.arange(7), {"x": torch.arange(7)}, [torch.arange(7), {"y": torch.arange(7)}]],
    ids=["tensor", "dictionary", "nested"],
)
def test_a_batch_of_any_form_is_split(batch: Any) -> None:
    parts = list(microbatches(batch, 7, size=3))
    assert [weight for _, weight in parts] == [3 / 7, 2 / 7, 2 / 7]
    first = parts[0][0]
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    assert first.tolist() == [0, 1, 2]


@pytest.mark.parametrize("batch", ["text", {"text": ["a", "b"], "x": torch.arange(2)}, [torch.arange(2), None]])
def test_a_batch_of_something_else_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="can't be divided; give only tensors"):
        list(microbatches(batch, 2))


def test_wrong_share_of_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch: 3 samples are not a rank's share of 8 on 1 ranks, which is 8"):
        list(microbatches(torch.arange(3), 8))


LENGTHS = torch.tensor([1, 10, 2, 10, 1, 1, 10, 3, 0, 5])


def token_gradient(rank: int, ranks: int, size: int | None) -> torch.Tensor:
    """Return the gradient of a mean over the tokens of a global batch of texts of unequal length."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GLOBAL_BATCH, 10, 4, generator=generator)
    y = torch.randint(0, 5, (GLOBAL_BATCH, 10), generator=generator)
    y[torch.arange(10) >= LENGTHS[:, None]] = -100
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 5)
    parameter = next(model.parameters())
    if ranks > 1:
        model = DistributedDataParallel(model)
    share = {"x": x[rank::ranks], "labels": y[rank::ranks]}
    parts = microbatches(share, GLOBAL_BATCH, size=size, model=model, count=lambda part: (part["labels"] != -100).sum())
    for part, weight in parts:
        labels = part["labels"].flatten()
        total = nn.functional.cross_entropy(model(part["x"]).flatten(0, 1), labels, reduction="sum")
        (weight * total / (labels != -100).sum().clamp(min=1)).backward()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("size", [None, 4, 2, 1])
def test_a_mean_over_tokens_does_not_depend_on_the_parts(on_ranks: Ranks, size: int | None) -> None:
    whole = token_gradient(0, 1, None)
    torch.testing.assert_close(token_gradient(0, 1, size), whole)
    for gradient in on_ranks(2, token_gradient, size):
        torch.testing.assert_close(gradient, whole)


def test_the_weights_of_counts_are_shares_of_all_counts() -> None:
    batch = torch.tensor([0, 1, 1, 0, 0, 0])
    parts = microbatches(batch, 6, size=2, count=lambda part: part.sum())
    assert [weight for _, weight in parts] == [0.5, 0.5, 0.0]
    assert [weight for _, weight in microbatches(batch, 6, count=lambda part: 0)] == [0.0]
