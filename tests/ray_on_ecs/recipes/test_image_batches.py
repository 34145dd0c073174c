"""Batches of images: the same micro-batches at any world size, and augmentation that only seed and epoch decide."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_on_ecs import DistributedSampler
from ray_on_ecs.recipes.image_batches import Images, ImagesInMemory, MicroBatches
from ray_on_ecs.recipes.ranks import Ranks
from tests.lazy import Lazy
from tests.photographs import write_photographs

photographs = Lazy("ray_on_ecs.recipes.photographs")
CPU = torch.device("cpu")
COUNT = 3  # micro-batches of a step
SIZE = 4


def in_memory(count: int = 50) -> ImagesInMemory:
    pixels = torch.randint(256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    part = (pixels, torch.arange(count))
    return ImagesInMemory("random", [str(index) for index in range(count)], part, part)


def data_set(kind: str, folder: Path) -> Images:
    return in_memory() if kind == "memory" else photographs.ImageFolders(write_photographs(folder, 25), 16)


def sampler_of(data: Images, ranks: Ranks, epoch: int = 0, step: int = 0) -> DistributedSampler:
    sampler = DistributedSampler(data)
    sampler.rank, sampler.world_size = ranks.rank, ranks.world_size
    sampler.set_epoch(epoch)
    sampler.position = step * COUNT * SIZE
    return sampler


def steps_of(data: Images, world_size: int = 1, **where: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step that is left of an epoch, in the order of the whole step."""
    shares: list[list[list[tuple[Tensor, Tensor]]]] = []
    for rank in range(world_size):
        sampler = sampler_of(data, Ranks(rank, world_size, CPU), **where)
        micro_batches = MicroBatches(sampler, len(data), SIZE, COUNT)
        batches = list(data.train_batches(micro_batches, CPU, seed=0, flip=True))
        each = micro_batches.per_rank
        shares.append([batches[start : start + each] for start in range(0, len(batches), each)])
        getattr(data, "_loaders", {}).clear()
    return [[step[n % world_size][n // world_size] for n in range(COUNT)] for step in zip(*shares, strict=True)]


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return len(first) == len(second) and all(map(equal, first, second))


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_world_size_does_not_change_micro_batches(kind: str, tmp_path: Path) -> None:
    data = data_set(kind, tmp_path)
    alone = steps_of(data)
    assert len(alone) == 50 // (COUNT * SIZE)
    assert equal(alone, steps_of(data, 2))
    assert equal(alone, steps_of(data, 3))


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_an_epoch_continues_from_its_position(kind: str, tmp_path: Path) -> None:
    data = data_set(kind, tmp_path)
    second = steps_of(data, epoch=1)
    assert equal(second[2:], steps_of(data, epoch=1, step=2))
    assert not equal(second, steps_of(data))


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_loading_leaves_the_random_numbers_of_dropout(kind: str, tmp_path: Path) -> None:
    data = data_set(kind, tmp_path)
    before = torch.get_rng_state()
    steps_of(data)
    list(data.test_batches(SIZE, Ranks(0, 1, CPU)))
    assert torch.equal(before, torch.get_rng_state())


def test_each_image_is_flipped_by_itself() -> None:
    data = in_memory()
    original = data.train[0][:, 0].float()
    flipped = 0
    for images, labels in (part for step in steps_of(data) for part in step):
        pixels = (images[:, 0] * data.std[0] + data.mean[0]).round()
        for image, label in zip(pixels, labels, strict=True):
            is_flipped = torch.equal(image, original[label].flip(-1))
            assert is_flipped or torch.equal(image, original[label])
            flipped += is_flipped
    assert 10 < flipped < 40


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_every_test_image_is_on_one_rank(kind: str, tmp_path: Path) -> None:
    data, seen = data_set(kind, tmp_path), []
    for rank in range(3):
        seen += [label for _, labels in data.test_batches(SIZE, Ranks(rank, 3, CPU)) for label in labels.tolist()]
        getattr(data, "_loaders", {}).clear()
    assert sorted(seen) == (list(range(50)) if kind == "memory" else [0] * 5 + [1] * 5)


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_a_rank_without_test_images_has_no_batch(kind: str, tmp_path: Path) -> None:
    assert not list(data_set(kind, tmp_path).test_batches(SIZE, Ranks(60, 61, CPU)))


def test_images_have_zero_mean_and_unit_variance() -> None:
    images = torch.cat([part for part, _ in in_memory().test_batches(SIZE, Ranks(0, 1, CPU))])
    torch.testing.assert_close((images.mean(), images.std()), (torch.tensor(0.0), torch.tensor(1.0)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["memory", "photographs"])
def test_a_limited_data_set_is_a_part(kind: str, tmp_path: Path) -> None:
    data = data_set(kind, tmp_path)
    data.limit(24)
    assert len(data) == 24
    assert len(steps_of(data)) == 2
