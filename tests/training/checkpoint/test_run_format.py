"""An unfinished run in tests/data, of each format that runs have had, is resumed to its end by today's code.

The folder was written by `python -m tests.training.checkpoint.test_run_format`, started in the repository's root: a
run that was cut off after 7 of 15 steps. Write one for each new `resume.FORMAT`, and keep those before as they are.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from training.checkpoint.manager import CheckpointManager
from training.checkpoint.resume import FORMAT, check_not_finished, check_settings_unchanged, write_settings
from training.recipes.images import datasets, models
from training.recipes.images.config import ImageConfig
from training.recipes.images.recipe import IMAGES
from training.recipes.images.trainer import ImageTrainer
from training.run.storage import RunStorage

DATA = Path(__file__).parents[2] / "data"
STEPS = 7


class Cut(Exception):
    """The run is cut off here."""


def tiny(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(channels, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(100, classes),
    )


def settings(folder: Path, number: int) -> ImageConfig:
    return ImageConfig(
        dataset="digits",
        model="tiny",
        epochs=3,
        batch_size=256,
        optimizer="sgd",
        num_workers=1,
        device="cpu",
        keep_checkpoints=1,
        checkpoint_seconds=0.0,
        storage_path=str(folder),
        run_name=f"run-format-{number}",
    ).resolve_defaults()


def train(config: ImageConfig, steps: int | None = None) -> ImageTrainer:
    """Resume a run to its end, or cut it off after so many steps and their checkpoint."""
    models.MODELS["tiny"] = tiny
    trainer = ImageTrainer(config, datasets.load("digits", config), torch.device("cpu"))
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    check_not_finished(storage)
    check_settings_unchanged(config, storage)
    write_settings(storage, config)
    with CheckpointManager(trainer, storage, config, score=IMAGES.score) as checkpoints:

        def on_step(step: int, steps_per_epoch: int) -> None:
            if trainer.step == steps:
                checkpoints.save()
                raise Cut

        checkpoints.resume()
        assert steps or trainer.step == STEPS, "it is resumed where it was cut off"
        while trainer.epoch < config.epochs:
            trainer.run_epoch(on_step)
            checkpoints.save()
    return trainer


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_run_of_this_format_is_resumed_to_its_end(tmp_path: Path, number: int) -> None:
    shutil.copytree(DATA / f"run-format-{number}", tmp_path / f"run-format-{number}")
    trainer = train(settings(tmp_path, number))
    assert trainer.step == 15
    assert [each["train_samples"] for each in trainer.history] == [1280] * 3, "no sample is lost or counted twice"
    assert (tmp_path / f"run-format-{number}" / "model.pt").exists()


if __name__ == "__main__":
    try:
        train(settings(Path("tests", "data"), FORMAT), STEPS)
    except Cut:
        print(f"written to tests/data/run-format-{FORMAT}")
