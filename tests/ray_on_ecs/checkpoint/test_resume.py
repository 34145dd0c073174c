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
from training.recipes.language import recipe
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus
from training.recipes.language.model import random_weights
from training.recipes.language.recipe import LANGUAGE
from training.recipes.language.trainer import LanguageTrainer

Config = Callable[..., LanguageConfig]


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


@pytest.fixture
def settings(config: Config, code: Corpus, storage: RunStorage) -> LanguageConfig:
    """The settings of a run that has a checkpoint."""
    settings = config(epochs=2, max_steps=4, batch_size=4, num_workers=1).resolve_defaults()
    write_settings(storage, settings)
    train(settings, code, storage, 1)
    return settings


def train(settings: LanguageConfig, text: Corpus, storage: RunStorage, epochs: int) -> None:
    shape = recipe._shape(settings, text.tokenizer.get_vocab_size())
    trainer = LanguageTrainer(settings, shape, random_weights(0, shape.layers), text, torch.device("cpu"))
    with CheckpointManager(trainer, storage, settings, score=LANGUAGE.score) as checkpoints:
        checkpoints.resume()
        while trainer.epoch < epochs:
            trainer.run_epoch()
            checkpoints.save()


def rewrite(storage: RunStorage, change: Callable[[dict], None]) -> None:
    document = storage.read_json("config.json")
    change(document)
    storage.write_json("config.json", document)


def test_settings_may_change_only_where_they_do_not_change_the_curve(
    settings: LanguageConfig, storage: RunStorage
) -> None:
    check_settings_unchanged(replace(settings, keep_checkpoints=9, bucket_mb=3.0), storage)
    with pytest.raises(UsageError, match=r"started with --batch-size 4 \(now 2\); repeat those settings"):
        check_settings_unchanged(replace(settings, batch_size=2), storage)


def test_a_run_stays_on_the_device_that_it_was_started_on(settings: LanguageConfig, storage: RunStorage) -> None:
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
    settings: LanguageConfig, storage: RunStorage
) -> None:
    rewrite(storage, lambda document: document.update(settings={"recipe": "images", "dataset": "digits"}))
    with pytest.raises(UsageError, match=r"started with --recipe images \(now language\); repeat those settings"):
        check_settings_unchanged(settings, storage)


@pytest.mark.parametrize("number", [None, layout.FORMAT + 1])
def test_a_folder_of_another_format_is_refused_in_a_line(
    settings: LanguageConfig, storage: RunStorage, number: int | None
) -> None:
    rewrite(storage, lambda document: document.update(format=number))
    for check in (lambda: check_not_finished(storage), lambda: check_settings_unchanged(settings, storage)):
        with pytest.raises(UsageError, match="was written by another version; give another --run-name") as caught:
            check()
        assert "\n" not in str(caught.value)


def test_checkpoints_without_settings_are_refused_in_a_line(settings: LanguageConfig, storage: RunStorage) -> None:
    storage.delete("config.json")
    with pytest.raises(UsageError, match="was written by another version"):
        check_not_finished(storage)


def test_a_new_folder_is_of_any_format(config: Config, storage: RunStorage) -> None:
    check_not_finished(storage)
    check_settings_unchanged(config(), storage)
    assert not newest_checkpoint(storage)


@pytest.mark.parametrize("part", ["contents", "sizes"])
def test_data_that_changed_under_a_run_is_refused_in_a_line(
    settings: LanguageConfig, code: Corpus, storage: RunStorage, part: str
) -> None:
    train(settings, code, storage, 1)
    changed = replace(code, fingerprint="another", train=code.train[:7000] if part == "sizes" else code.train)
    with pytest.raises(UsageError, match="was started with other data") as caught:
        train(settings, changed, storage, 2)
    assert (f"train_tokens {len(code.train)} (now 7000)" in str(caught.value)) is (part == "sizes")
    assert "\n" not in str(caught.value)
