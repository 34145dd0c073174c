from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training.ranks import Ranks
from training.errors import UsageError
from training.recipes.images import batch_norm
from training.recipes.images.batch_norm import BatchNormGroups, GroupedBatchNorm

CPU = torch.device("cpu")
LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.mark.parametrize(
    ("batch_size", "world_size", "expected"),
    [
        (64, 1, BatchNormGroups(1, 1)),
        (128, 1, BatchNormGroups(2, 1)),
        (100, 1, BatchNormGroups(2, 1)),
        (32, 2, BatchNormGroups(1, 2)),
        (16, 4, BatchNormGroups(1, 4)),
        (16, 8, BatchNormGroups(1, 4)),
        (24, 4, BatchNormGroups(1, 2)),
        (32, 3, BatchNormGroups(1, 1)),
        (1, 4, BatchNormGroups(1, 4)),
        (65, 1, BatchNormGroups(2, 1)),
    ],
)
def test_workers_split_a_large_batch_and_pool_small_ones(
    batch_size: int, world_size: int, expected: BatchNormGroups
) -> None:
    assert BatchNormGroups.for_run(batch_size, 64, world_size) == expected


def test_no_part_is_a_single_image() -> None:
    assert BatchNormGroups.for_run(3, 2, 1) == BatchNormGroups(1, 1), "it has no variance"


def test_each_worker_keeps_its_own_where_that_is_wanted() -> None:
    assert BatchNormGroups.for_run(128, 0, 4) == BatchNormGroups(1, 1)


def test_a_model_whose_groups_are_the_batches_is_left_as_it_is() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert batch_norm.group(plain, BatchNormGroups(1, 1), CPU) is plain
    assert type(plain[1]) is nn.BatchNorm2d, "torch's own batch norm is the faster one"


def test_a_batch_norm_that_does_more_is_refused_not_replaced() -> None:
    class NormAndActivation(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(UsageError, match=r"--norm-batch: this model's NormAndActivation .* --norm-batch 0"):
        batch_norm.group(nn.Sequential(NormAndActivation(3)), BatchNormGroups(2, 1), CPU)


def test_a_batch_norm_that_is_used_twice_stays_one() -> None:
    layer = nn.BatchNorm2d(3)
    first, second = batch_norm.group(nn.Sequential(layer, layer), BatchNormGroups(2, 1), CPU)._modules.values()
    assert isinstance(first, GroupedBatchNorm)
    assert first is second


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_part_is_normalized_as_a_batch_of_its_own(dimensions: int) -> None:
    images = torch.randn(8, 3, *[4] * dimensions)
    plain, grouped = LAYERS[dimensions](3), batch_norm.group(LAYERS[dimensions](3), BatchNormGroups(2, 1), CPU)
    expected = torch.cat([plain(part) for part in images.chunk(2)])
    assert torch.allclose(grouped(images), expected)


def test_the_running_statistics_are_the_mean_of_the_groups() -> None:
    images = torch.randn(8, 3, 4, 4)
    grouped = batch_norm.group(nn.BatchNorm2d(3), BatchNormGroups(2, 1), CPU)
    parts = [nn.BatchNorm2d(3), nn.BatchNorm2d(3)]
    grouped(images)
    for layer, part in zip(parts, images.chunk(2), strict=True):
        layer(part)
    for name in ("running_mean", "running_var"):
        expected = (getattr(parts[0], name) + getattr(parts[1], name)) / 2
        assert torch.allclose(getattr(grouped, name), expected, atol=1e-6)
    assert grouped.num_batches_tracked == 1, "a step counts once"


def test_a_trained_model_is_tested_as_the_plain_one_and_its_weights_load_there() -> None:
    grouped = batch_norm.group(nn.Sequential(nn.BatchNorm2d(3)), BatchNormGroups(4, 1), CPU)
    plain = nn.Sequential(nn.BatchNorm2d(3))
    grouped(torch.randn(8, 3, 4, 4))
    plain.load_state_dict(grouped.state_dict())
    images = torch.randn(8, 3, 4, 4)
    assert torch.equal(grouped.eval()(images), plain.eval()(images))


def test_options_of_the_batch_norm_are_kept() -> None:
    layer = nn.BatchNorm2d(3, eps=0.5, momentum=None, affine=False).double()
    [grouped] = batch_norm.group(nn.Sequential(layer), BatchNormGroups(2, 1), CPU).children()
    assert isinstance(grouped, GroupedBatchNorm)
    assert (grouped.eps, grouped.momentum, grouped.weight) == (0.5, None, None)
    images = torch.randn(8, 3, 4, 4, dtype=torch.double)
    first = grouped(images)
    assert first.dtype == torch.double
    torch.testing.assert_close(grouped.running_mean, images.mean((0, 2, 3)))  # without momentum: the plain mean


def pool(rank: int, ranks: int, images: torch.Tensor) -> dict[str, Any]:
    """A backward pass through a batch norm that the ranks share, each with its part of the images."""
    layer = batch_norm.group(nn.Sequential(nn.BatchNorm2d(3)), BatchNormGroups(1, ranks), CPU)
    mine = images.chunk(ranks)[rank].clone().requires_grad_()
    normalized = layer(mine)
    normalized.pow(3).sum().backward()
    batch_norm.sync_buffers(layer, 1 / ranks)
    return {"normalized": normalized.detach(), "gradient": mine.grad, "state": layer.state_dict()}


def test_workers_that_pool_compute_what_one_would_with_all_the_images(on_ranks: Ranks) -> None:
    images = torch.randn(8, 3, 4, 4) * 2 + 5
    ranks = on_ranks(2, pool, images)
    plain, whole = nn.BatchNorm2d(3), images.clone().requires_grad_()
    expected = plain(whole)
    expected.pow(3).sum().backward()
    assert torch.allclose(torch.cat([each["normalized"] for each in ranks]), expected, atol=1e-5)
    gradient = torch.cat([each["gradient"] for each in ranks])
    torch.testing.assert_close(gradient, whole.grad, atol=1e-4, rtol=1e-4)  # each image is in the others' statistics
    for each in ranks:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(each["state"][f"0.{name}"], value)


def on_gpus(rank: int, ranks: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether a norm over all ranks is PyTorch's own on a GPU, for these ranks, and its state_dict."""
    layer = nn.Sequential(nn.BatchNorm2d(3, momentum=0.2))
    [norm] = batch_norm.group(layer, BatchNormGroups(1, ranks), torch.device("cuda")).children()
    own = isinstance(norm, nn.SyncBatchNorm) and norm.momentum == 0.2
    return own and dist.get_world_size(norm.process_group) == ranks, layer.state_dict()


def test_on_gpus_ranks_pool_by_pytorch_s_own_batch_norm(on_ranks: Ranks) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3)).state_dict()
    for own, state in on_ranks(2, on_gpus):
        assert own, "its kernels are fused; ours are for CPUs, where it has none"
        assert list(state) == list(plain), "the weights keep their names"


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once_per_step_by_the_mean_over_its_micro_batches(momentum: float | None) -> None:
    layer = nn.BatchNorm2d(3, momentum=momentum)
    ranks = [nn.BatchNorm2d(3, momentum=momentum) for _ in range(4)]
    for _ in range(3):
        microbatches = torch.randn(4, 8, 3, 4, 4)
        for microbatch in batch_norm.once_per_step(layer, list(microbatches)):
            layer(microbatch)
        for rank, microbatch in zip(ranks, microbatches, strict=True):
            rank(microbatch)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(rank, name) for rank in ranks]).mean(0)
        torch.testing.assert_close(getattr(layer, name), expected)
    assert layer.num_batches_tracked == 3, "or momentum would depend on the number of workers"


def test_a_model_without_batch_norm_takes_every_micro_batch() -> None:
    assert list(batch_norm.once_per_step(nn.Linear(2, 2), [1, 2, 3])) == [1, 2, 3]


def sync(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Share buffers of several dtypes, of which rank 0 had three micro-batches and rank 1 one."""
    norms = [nn.BatchNorm2d(2), nn.BatchNorm2d(2).double()]
    layer = nn.Sequential(*norms)
    layer.register_buffer("own", torch.tensor([[rank, rank + 1]]))
    for norm in norms:
        nn.init.constant_(norm.get_buffer("running_mean"), 4 * rank)
    batch_norm.sync_buffers(layer, weight=0.75 if rank == 0 else 0.25)
    return layer.state_dict()


def test_running_statistics_are_weighted_by_each_rank_s_micro_batches(on_ranks: Ranks) -> None:
    for state in on_ranks(2, sync):
        assert state["0.running_mean"].tolist() == [1, 1], "0 by three quarters and 4 by one"
        assert state["1.running_mean"].tolist() == [1, 1]
        assert state["1.running_mean"].dtype == torch.double
        assert state["0.running_var"].tolist() == [1, 1]
        assert state["own"].tolist() == [[0, 1]], "any other buffer is rank 0's"
