"""Which runs may be resumed: with the settings and the data that they were started with, in a folder of this format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.checkpoint.resume import (
    check_not_finished,
    check_settings_unchanged,
    keep_device,
    newest_checkpoint,
    write_settings,
)
from ray_on_ecs.errors import UsageError
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.recipe import IMAGES
from training.recipes.images.trainer import ImageTrainer
from training.recipes.settings import parse_training

Config = Callable[..., ImageConfig]


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


@pytest.fixture
def settings(config: Config, digits: Dataset, storage: RunStorage) -> ImageConfig:
    """The settings of a run that has a checkpoint."""
    settings = config(batch_size=256, num_workers=1).resolve_defaults()
    write_settings(storage, settings)
    train(settings, digits, storage, 1)
    return settings


def train(settings: ImageConfig, dataset: Dataset, storage: RunStorage, epochs: int) -> None:
    trainer = ImageTrainer(replace(settings, model="tests.ray_on_ecs.checkpoint.test_resume:linear"), dataset, CPU)
    with CheckpointManager(trainer, storage, settings, score=IMAGES.score) as checkpoints:
        checkpoints.resume()
        while trainer.epoch < epochs:
            trainer.run_epoch()
            checkpoints.save()


CPU = torch.device("cpu")


def linear(channels: int, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784 * channels, classes))


def rewrite(storage: RunStorage, change: Callable[[dict], None]) -> None:
    document = storage.read_json("config.json")
    change(document)
    storage.write_json("config.json", document)


def test_settings_may_change_only_where_they_do_not_change_the_curve(
    settings: ImageConfig, storage: RunStorage
) -> None:
    check_settings_unchanged(replace(settings, keep_checkpoints=9, bucket_mb=3.0), storage)
    with pytest.raises(UsageError, match=r"started with --batch-size 256 \(now 64\); repeat those settings"):
        check_settings_unchanged(replace(settings, batch_size=64), storage)


def test_a_run_stays_on_the_device_that_it_was_started_on(settings: ImageConfig, storage: RunStorage) -> None:
    rewrite(storage, lambda document: document["settings"].update(device="cuda"))
    assert keep_device(replace(settings, device="auto"), storage).device == "cuda"
    assert keep_device(replace(settings, device="cpu"), storage).device == "cpu"
    with pytest.raises(UsageError, match=r"started with --device cuda \(now cpu\); repeat those settings"):
        check_settings_unchanged(replace(settings, device="cpu"), storage)


def test_a_new_run_takes_the_device_that_there_is(config: Config, storage: RunStorage) -> None:
    assert keep_device(config(device="auto"), storage).device == "auto"
    write_settings(storage, config(device="cpu"))  # it ended before its first checkpoint
    assert keep_device(config(device="auto"), storage).device == "auto"


def test_a_run_of_another_recipe_is_refused_without_that_one_s_settings(
    settings: ImageConfig, storage: RunStorage
) -> None:
    language = parse_training(["--recipe", "language", "--run-name", "test"], {}).resolve_defaults()
    with pytest.raises(UsageError, match=r"started with --recipe images \(now language\); repeat those settings"):
        check_settings_unchanged(language, storage)


@pytest.mark.parametrize("number", [None, layout.FORMAT + 1])
def test_a_folder_of_another_format_is_refused_in_a_line(
    settings: ImageConfig, storage: RunStorage, number: int | None
) -> None:
    rewrite(storage, lambda document: document.update(format=number))
    for check in (lambda: check_not_finished(storage), lambda: check_settings_unchanged(settings, storage)):
        with pytest.raises(UsageError, match="was written by another version; give another --run-name") as caught:
            check()
        assert "\n" not in str(caught.value)


def test_checkpoints_without_settings_are_refused_in_a_line(settings: ImageConfig, storage: RunStorage) -> None:
    storage.delete("config.json")
    with pytest.raises(UsageError, match="was written by another version"):
        check_not_finished(storage)


def test_a_new_folder_is_of_any_format(config: Config, storage: RunStorage) -> None:
    check_not_finished(storage)
    check_settings_unchanged(config(), storage)
    assert not newest_checkpoint(storage)


def changed(dataset: Dataset, part: str) -> Dataset:
    """The same data set with other labels, other pixels, or fewer images."""
    images, labels = dataset.train.images.clone(), dataset.train.labels.clone()
    if part == "labels":
        labels[7] = (labels[7] + 1) % 10
    elif part == "pixels":
        images[::2] = images[::2].flip(3)
    else:
        images, labels = images[:700], labels[:700]
    return Dataset.from_splits(dataset.name, Split(images, labels), dataset.test, dataset.classes)


@pytest.mark.parametrize("part", ["labels", "pixels", "sizes"])
def test_data_that_changed_under_a_run_is_refused_in_a_line(
    settings: ImageConfig, digits: Dataset, storage: RunStorage, part: str
) -> None:
    train(settings, digits, storage, 1)
    with pytest.raises(UsageError, match="was started with other data") as caught:
        train(settings, changed(digits, part), storage, 2)
    assert ("train_samples 1438 (now 700)" in str(caught.value)) is (part == "sizes")
    assert "\n" not in str(caught.value)


def test_the_fingerprint_is_that_of_the_data_and_not_of_its_place(digits: Dataset) -> None:
    copy = Dataset.from_splits("other", digits.train, digits.test, digits.classes)
    assert copy.fingerprint == digits.fingerprint
    assert len({digits.fingerprint, *(changed(digits, part).fingerprint for part in ("labels", "pixels"))}) == 3
