import pytest
import torch
from torch import nn

from tests.training.ranks import Ranks
from training.recipes.images import running_statistics


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once_per_step_by_the_mean_over_its_micro_batches(momentum: float | None) -> None:
    layer = nn.BatchNorm2d(3, momentum=momentum)
    ranks = [nn.BatchNorm2d(3, momentum=momentum) for _ in range(4)]
    for _ in range(3):
        microbatches = torch.randn(4, 8, 3, 4, 4)
        for microbatch in running_statistics.once_per_step(layer, list(microbatches)):
            layer(microbatch)
        for rank, microbatch in zip(ranks, microbatches, strict=True):
            rank(microbatch)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(rank, name) for rank in ranks]).mean(0)
        torch.testing.assert_close(getattr(layer, name), expected)
    assert layer.num_batches_tracked == 3, "or momentum would depend on the number of workers"


def test_a_model_without_batch_norm_takes_every_micro_batch() -> None:
    assert list(running_statistics.once_per_step(nn.Linear(2, 2), [1, 2, 3])) == [1, 2, 3]


def sync(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Share buffers of several dtypes, of which rank 0 had three micro-batches and rank 1 one."""
    norms = [nn.BatchNorm2d(2), nn.BatchNorm2d(2).double()]
    layer = nn.Sequential(*norms)
    layer.register_buffer("own", torch.tensor([[rank, rank + 1]]))
    for norm in norms:
        nn.init.constant_(norm.get_buffer("running_mean"), 4 * rank)
    running_statistics.sync_buffers(layer, weight=0.75 if rank == 0 else 0.25)
    return layer.state_dict()


def test_running_statistics_are_weighted_by_each_rank_s_micro_batches(on_ranks: Ranks) -> None:
    for state in on_ranks(2, sync):
        assert state["0.running_mean"].tolist() == [1, 1], "0 by three quarters and 4 by one"
        assert state["1.running_mean"].tolist() == [1, 1]
        assert state["1.running_mean"].dtype == torch.double
        assert state["0.running_var"].tolist() == [1, 1]
        assert state["own"].tolist() == [[0, 1]], "any other buffer is rank 0's"
