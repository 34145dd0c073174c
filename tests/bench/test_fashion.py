"""The images that the benchmarks are made on."""

import pytest
import torch

from bench import fashion, input
from training.recipes.images.datasets import Dataset, Split


@pytest.fixture
def source() -> Split:
    """Ten images of each of ten classes, each class of a brightness of its own in its middle."""
    labels = torch.arange(100) % 10
    images = torch.zeros(100, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 8:20, 8:20] = (labels * 25).to(torch.uint8).reshape(-1, 1, 1, 1)
    return Split(images, labels)


def made(source: Split, number: int = 2000, seed: int = 0) -> Split:
    return fashion.multiply(source, number, torch.Generator().manual_seed(seed))


def test_as_many_as_wanted_are_made_of_each_class(source: Split) -> None:
    split = made(source)
    assert split.images.shape == (2000, 1, 28, 28)
    assert split.images.dtype == torch.uint8
    assert split.labels.bincount().tolist() == [200] * 10


def test_an_image_is_made_of_its_class_alone(source: Split) -> None:
    split = made(source)
    middle = split.images[:, 0, 11:17, 11:17].float().mean((1, 2))
    for label in range(1, 9):
        assert middle[split.labels == label].mean() == pytest.approx(25 * label, abs=2), "blends stay within a class"


def test_no_image_is_made_twice(source: Split) -> None:
    assert len(made(source).images.flatten(1).unique(dim=0)) == 2000


def test_a_seed_makes_the_same_images_again_and_another_others(source: Split) -> None:
    assert torch.equal(made(source).images, made(source).images)
    assert not torch.equal(made(source).images, made(source, seed=1).images)


def test_images_are_shifted_and_mirrored(source: Split) -> None:
    source.images[:, :, 8:20, 14:20] = 0  # the left half is bright
    split = made(source)
    bright = split.images[split.labels == 9][:, 0].float()
    columns = (bright.mean(1) > 60).float()
    first = columns.argmax(1)
    assert {6, 7, 8, 9, 10} <= set(first.tolist()), "up to two pixels either way"
    assert {12, 13, 14, 15, 16} <= set(first.tolist()), "mirrored, the right half is"


def test_both_inputs_hand_out_each_image_once_and_normalized_alike(source: Split) -> None:
    whole = fashion.multiply(source, 3 * input.BATCH_SIZE, torch.Generator().manual_seed(0))
    dataset = Dataset.from_splits("tiny", whole, whole, classes=10)
    for batches in (input.per_sample, input.in_batches):
        images, labels = (torch.cat(parts) for parts in zip(*batches(dataset, epoch=0), strict=True))
        assert sorted(labels.tolist()) == sorted(whole.labels.tolist()), "else the two would not be compared"
        assert images.dtype == torch.float32
        assert images.mean().item() == pytest.approx(0, abs=1e-4)
        assert images.std().item() == pytest.approx(1, abs=1e-3)
