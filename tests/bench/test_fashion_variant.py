"""The images on which the benchmarks train."""

import pytest
import torch

from bench import data_loading, fashion_variant
from training.recipes.images.datasets import Dataset, Split


@pytest.fixture
def source() -> Split:
    """Ten images of each of ten classes; the brightness in the middle of an image tells its class."""
    labels = torch.arange(100) % 10
    images = torch.zeros(100, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 8:20, 8:20] = (labels * 25).to(torch.uint8).reshape(-1, 1, 1, 1)
    return Split(images, labels)


def make(source: Split, number: int = 2000, seed: int = 0) -> Split:
    return fashion_variant.multiply(source, number, torch.Generator().manual_seed(seed))


def test_each_class_gets_the_same_number_of_images(source: Split) -> None:
    split = make(source)
    assert split.images.shape == (2000, 1, 28, 28)
    assert split.images.dtype == torch.uint8
    assert split.labels.bincount().tolist() == [200] * 10


def test_an_image_is_a_blend_of_images_of_its_class(source: Split) -> None:
    split = make(source)
    middle = split.images[:, 0, 11:17, 11:17].float().mean((1, 2))
    for label in range(1, 9):
        assert middle[split.labels == label].mean() == pytest.approx(25 * label, abs=2), "blends stay within a class"


def test_no_two_images_are_the_same(source: Split) -> None:
    assert len(make(source).images.flatten(1).unique(dim=0)) == 2000


def test_a_seed_determines_the_images(source: Split) -> None:
    assert torch.equal(make(source).images, make(source).images)
    assert not torch.equal(make(source).images, make(source, seed=1).images)


def test_images_are_translated_and_flipped(source: Split) -> None:
    source.images[:, :, 8:20, 14:20] = 0  # the left half is bright
    split = make(source)
    bright = split.images[split.labels == 9][:, 0].float()
    columns = (bright.mean(1) > 60).float()
    first = columns.argmax(1)
    assert {6, 7, 8, 9, 10} <= set(first.tolist()), "up to two pixels either way"
    assert {12, 13, 14, 15, 16} <= set(first.tolist()), "flipped, the right half is bright"


def test_both_loaders_yield_each_image_once_with_the_same_normalization(source: Split) -> None:
    split = fashion_variant.multiply(source, 3 * data_loading.BATCH_SIZE, torch.Generator().manual_seed(0))
    dataset = Dataset.from_splits("tiny", split, split, classes=10)
    for batches in (data_loading.per_sample, data_loading.in_batches):
        images, labels = (torch.cat(parts) for parts in zip(*batches(dataset, epoch=0), strict=True))
        assert sorted(labels.tolist()) == sorted(split.labels.tolist()), "else the two would not be compared"
        assert images.dtype == torch.float32
        assert images.mean().item() == pytest.approx(0, abs=1e-4)
        assert images.std().item() == pytest.approx(1, abs=1e-3)
