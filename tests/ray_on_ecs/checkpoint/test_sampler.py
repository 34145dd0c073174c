"""The sampler and the global batches: what each rank gets, from any position on."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ray_on_ecs import DistributedSampler


def make_sampler(
    samples: int, rank: int = 0, ranks: int = 1, seed: int = 0, shuffle: bool = True
) -> DistributedSampler:
    sampler = DistributedSampler(range(samples), seed=seed, shuffle=shuffle)
    sampler.rank, sampler.world_size = rank, ranks
    return sampler


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_ranks_share_all_samples_equally(ranks: int) -> None:
    shares = [list(make_sampler(20, rank, ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-20 // ranks)} == {len(make_sampler(20, 0, ranks))}
    assert {index for share in shares for index in share} == set(range(20))


def test_the_order_follows_from_seed_and_epoch() -> None:
    first, second = make_sampler(50), make_sampler(50)
    assert list(first) == list(second) != list(range(50))
    second.set_epoch(1)
    assert list(first) != list(second)
    assert list(make_sampler(50, seed=1)) != list(make_sampler(50))
    assert list(make_sampler(50, shuffle=False)) == list(range(50))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (4, 1)])
def test_a_position_is_of_all_ranks(before: int, after: int) -> None:
    second = {index for rank in range(before) for index in list(make_sampler(24, rank, before))[12 // before :]}
    rest: set[int] = set()
    for rank in range(after):
        resumed = make_sampler(24, rank, after)
        resumed.load_state_dict({"epoch": 0, "position": 12, "samples": 24, "seed": 0})
        assert len(resumed) == 24 // after
        rest |= set(resumed)
    assert rest == second


def test_epoch_continues_at_its_position() -> None:
    sampler = make_sampler(10)
    sampler.position = 4
    sampler.set_epoch(0)
    assert sampler.position == 4
    sampler.set_epoch(1)
    assert sampler.position == 0


def test_second_pass_without_end_epoch_is_refused() -> None:
    sampler = make_sampler(4)
    for _ in DataLoader(TensorDataset(torch.arange(4)), sampler=sampler):
        sampler.position += 1
    assert list(sampler) == []
    with pytest.raises(RuntimeError, match=r"epoch 0 has no samples left; call end_epoch\(\) or set_epoch\(\)"):
        list(sampler)


@pytest.mark.parametrize(
    ("field", "named"), [("samples", "samples was 9, and is 10"), ("seed", "seed was 9, and is 0")]
)
def test_a_position_of_other_data_is_refused(field: str, named: str) -> None:
    state = {"epoch": 0, "position": 0, "samples": 10, "seed": 0, field: 9}
    with pytest.raises(ValueError, match=named):
        make_sampler(10).load_state_dict(state)


@pytest.mark.parametrize(
    ("ranks", "position", "is_wrong"), [(1, 24, False), (2, 24, False), (2, 12, True), (2, 8, False), (3, 20, False)]
)
def test_count_of_one_ranks_samples_is_noticed(ranks: int, position: int, is_wrong: bool) -> None:
    sampler = make_sampler(24, 0, ranks)
    sampler.position = position
    assert sampler.counts_one_rank(4) is is_wrong


@pytest.mark.parametrize(("samples", "size"), [(64, 24), (64, 64), (100, 256), (256, 120), (700, 256), (1000, 24)])
@pytest.mark.parametrize(("ranks", "drops_last"), [(2, False), (2, True), (3, True), (8, False)])
def test_only_counts_of_one_rank_are_noticed(samples: int, size: int, ranks: int, drops_last: bool) -> None:
    share = -(-samples // ranks)
    batches = [min(size // ranks, share - start) for start in range(0, share, size // ranks)]
    batches = [batch for batch in batches if batch == size // ranks or not drops_last]
    sampler = make_sampler(samples, 0, ranks)
    sampler.position = sum(batches) * ranks
    assert not batches or not sampler.counts_one_rank(batches[-1] * ranks)
    sampler.position = sum(batches)
    assert len(batches) < 2 or sampler.counts_one_rank(batches[-1])


@pytest.mark.parametrize(("samples", "size"), [(64, 64), (700, 256), (255, 128), (300, 256), (512, 256)])
def test_count_of_global_batches_is_right(samples: int, size: int) -> None:
    sampler = make_sampler(samples, 0, 2)
    sampler.position = samples // size * size
    assert not sampler.counts_one_rank(size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_global_batch_is_equal_on_all_world_sizes(ranks: int) -> None:
    shares = [list(make_sampler(25, rank, ranks).batches(8)) for rank in range(ranks)]
    batches = [{index for share in shares for index in share[step]} for step in range(3)]
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert {len(share) for share in shares} == {3} == {len(make_sampler(25, 0, ranks).batches(8))}
    order = list(make_sampler(25))
    assert batches == [set(order[8 * step : 8 * step + 8]) for step in range(3)]


def test_global_batches_without_end_epoch_are_refused() -> None:
    sampler = make_sampler(20)
    sampler.position = 16
    assert list(sampler.batches(8)) == []
    with pytest.raises(RuntimeError, match="epoch 0 has no samples left"):
        list(sampler.batches(8))


def test_data_set_below_world_size_is_repeated() -> None:
    assert [len(list(make_sampler(2, rank, 5))) for rank in range(5)] == [1] * 5


def test_global_batches_go_on_from_a_position() -> None:
    sampler = make_sampler(24)
    whole = list(sampler.batches(8))
    sampler.position = 8
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_sampler=sampler.batches(8))
    assert [batch.tolist() for [batch] in loader] == whole[1:]


@pytest.mark.parametrize("size", [1, 25])
def test_impossible_global_batch_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"global_batch_size: {size} must be at least 2, the number of ranks, and"):
        make_sampler(24, 0, 2).batches(size)
