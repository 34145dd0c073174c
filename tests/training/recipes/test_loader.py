from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ray_on_ecs.errors import UsageError
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.loader import Batch, BatchLoader

CPU = torch.device("cpu")
Config = Callable[..., ImageConfig]
Numbered = Callable[[int], Dataset]


@pytest.fixture
def numbered() -> Numbered:
    """A data set whose labels are the images' numbers, and whose pixels grow from there to the right."""

    def build(n: int) -> Dataset:
        labels = torch.arange(n)
        images = (labels.view(n, 1, 1, 1) + torch.arange(6)).remainder(256).to(torch.uint8).expand(n, 1, 6, 6)
        return Dataset.from_splits("numbered", Split(images, labels), Split(images, labels), classes=n)

    return build


def epoch_of(loader: BatchLoader, epoch: int) -> list[Batch]:
    """The micro-batches of all steps of an epoch."""
    return [microbatch for microbatches in loader.train(epoch) for microbatch in microbatches]


def labels(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([each for _, each in batches])


@pytest.mark.parametrize(("samples", "ranks", "batch_size"), [(100, 1, 32), (100, 3, 16), (64, 4, 16), (7, 1, 3)])
def test_an_epoch_shows_whole_global_batches_and_no_image_twice(
    config: Config, numbered: Numbered, samples: int, ranks: int, batch_size: int
) -> None:
    settings, dataset = config(batch_size=batch_size), numbered(samples)
    shown = [epoch_of(BatchLoader(dataset, settings, rank, ranks, CPU), 0) for rank in range(ranks)]
    seen = torch.cat([labels(rank) for rank in shown]).tolist()
    assert len(seen) == len(set(seen)) == samples // (ranks * batch_size) * ranks * batch_size
    assert {len(rank) for rank in shown} == {samples // (ranks * batch_size)}, "or DDP would wait for ever"
    assert {len(batch) for rank in shown for _, batch in rank} == {batch_size}, "shapes never change"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_together_take_what_one_worker_would(config: Config, numbered: Numbered, ranks: int) -> None:
    dataset = replace(numbered(100), flip_invariant=True)
    one, several = config(batch_size=32, max_shift=2), config(batch_size=32 // ranks, max_shift=2)
    alone = epoch_of(BatchLoader(dataset, one, 0, 1, CPU), 3)
    shares = [epoch_of(BatchLoader(dataset, several, rank, ranks, CPU), 3) for rank in range(ranks)]
    for step, (images, expected) in enumerate(alone):
        together = [share[step] for share in shares]
        assert torch.equal(labels(together), expected), "the same images in the same step"
        assert torch.equal(torch.cat([each for each, _ in together]), images), "shifted and mirrored alike"


def test_each_epoch_and_seed_is_shuffled_anew(config: Config, numbered: Numbered) -> None:
    dataset = numbered(64)
    orders = {
        tuple(labels(epoch_of(BatchLoader(dataset, config(seed=seed), 0, 1, CPU), epoch)).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4, "the post's script shows the same order in every epoch: it lacks set_epoch"


@pytest.mark.parametrize(("seed", "other"), [(0, 4096), (42, 4138), (0, 2**32 - 1)])
def test_seeds_that_are_far_apart_have_shuffles_of_their_own(
    config: Config, numbered: Numbered, seed: int, other: int
) -> None:
    dataset = numbered(64)
    first, second = (labels(epoch_of(BatchLoader(dataset, config(seed=each), 0, 1, CPU), 0)) for each in (seed, other))
    assert not torch.equal(first, second), "PyTorch's generator takes the lower 32 bits of a seed alone"


def test_what_an_epoch_leaves_out_is_not_always_the_same(config: Config, numbered: Numbered) -> None:
    batches = BatchLoader(numbered(100), config(batch_size=64), 0, 1, CPU)
    first, second = (set(labels(epoch_of(batches, epoch)).tolist()) for epoch in (0, 1))
    assert first != second, "an image that is always left out is never learnt"


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_test_image_is_on_exactly_one_rank(config: Config, numbered: Numbered, ranks: int) -> None:
    dataset, settings = numbered(150), config(batch_size=4)
    seen = torch.cat([labels(list(BatchLoader(dataset, settings, rank, ranks, CPU).test())) for rank in range(ranks)])
    assert sorted(seen.tolist()) == list(range(150)), "an accuracy over padded shards is not the accuracy"


def test_batches_made_ahead_are_those_of_a_set_on_the_device(config: Config, digits: Dataset) -> None:
    on_device, streamed = (
        epoch_of(BatchLoader(digits, config(data_on_device=where), 1, 2, CPU), 1) for where in ("on", "off")
    )
    pairs = zip(on_device, streamed, strict=True)
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def test_a_broken_image_ends_the_epoch_with_its_error(config: Config, numbered: Numbered) -> None:
    dataset = numbered(64)
    broken = replace(dataset, train=Split(dataset.train.images[:60], dataset.train.labels))
    with pytest.raises(IndexError):
        epoch_of(BatchLoader(broken, config(data_on_device="off", batch_size=32), 0, 1, CPU), 0)


def test_images_are_left_as_they_are_where_nothing_is_to_change_them(config: Config, numbered: Numbered) -> None:
    dataset = numbered(64)
    forbidden, unwanted = (dataset, config()), (replace(dataset, flip_invariant=True), config(horizontal_flip="off"))
    for changed, settings in (forbidden, unwanted):
        [(images, shown)] = epoch_of(BatchLoader(changed, settings, 0, 1, CPU), 0)
        assert torch.equal(images, dataset.normalize(dataset.train.images[shown]))


def test_images_are_mirrored_and_shifted_where_that_is_wanted(config: Config, numbered: Numbered) -> None:
    dataset = replace(numbered(64), flip_invariant=True)
    [(images, shown)] = epoch_of(BatchLoader(dataset, config(max_shift=1), 0, 1, CPU), 0)
    stored = dataset.normalize(dataset.train.images[shown])
    changed = (images != stored).flatten(1).any(1)
    assert 40 < changed.sum() < 64, "a few are neither mirrored nor moved"


def test_test_images_are_never_augmented(config: Config, digits: Dataset) -> None:
    images, _ = next(BatchLoader(replace(digits, flip_invariant=True), config(max_shift=2), 0, 1, CPU).test())
    assert torch.equal(images, digits.normalize(digits.test.images[: len(images)]))


def test_a_set_without_test_images_is_refused_before_it_is_trained_on(config: Config, numbered: Numbered) -> None:
    dataset = numbered(64)
    untested = replace(dataset, test=Split(dataset.test.images[:0], dataset.test.labels[:0]))
    with pytest.raises(UsageError, match=r"--dataset: 'numbered' has no test images, .*; split some off its 64"):
        BatchLoader(untested, config(), 0, 1, CPU)


def test_a_set_that_fills_no_step_is_refused_with_the_size_that_would_do(config: Config, numbered: Numbered) -> None:
    with pytest.raises(UsageError, match=r"--batch-size: 64 on each of 2 workers is 128 images .* has 100; use 50"):
        BatchLoader(numbered(100), config(batch_size=64), 0, 2, CPU)
