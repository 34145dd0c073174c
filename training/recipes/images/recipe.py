"""The recipe of the image classifier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ray_on_ecs.filesystem import check_outside
from training.engine.feed import Feed
from training.engine.recipe import Quality, Recipe
from training.recipes.images import datasets, models
from training.recipes.images.config import FOLDER, ImageConfig
from training.recipes.images.trainer import ImageTrainer


def prepare(config: ImageConfig) -> ImageConfig:
    """Check the model and the data set, and resolve `auto` and the folder of the data.

    Raises:
        UsageError: The model can't be imported, or the data set is not available.
    """
    models.find(config.model)
    if config.data_dir is not None and "://" not in config.data_dir:  # Ray gives its workers another working directory
        config = replace(config, data_dir=str(Path(config.data_dir).expanduser().absolute()))
    if config.dataset == FOLDER and config.data_dir is not None:
        check_outside(config.data_dir, "--data-dir", config.storage_path)
    return replace(config, dataset=datasets.resolve_dataset(config))


def build(config: ImageConfig, device: torch.device, feed: Feed) -> ImageTrainer:
    """Load the data set, or find its files, and build this rank's trainer on a device.

    Raises:
        UsageError: The data set is not available, or the settings don't fit it or the model.
    """
    return ImageTrainer(config, datasets.load(config.dataset, config, feed), device, feed)


def describe(requested: ImageConfig, config: ImageConfig) -> dict[str, str]:
    """Return the header's lines on the model and the data, by label."""
    fell_back = requested.dataset == "auto" and config.dataset == "digits"
    return {
        "model": f"{config.model}, {config.epochs} epoch{'' if config.epochs == 1 else 's'}",
        "data": (datasets.describe_folder(config) if config.dataset == FOLDER else config.dataset)
        + (", because Fashion-MNIST can't be downloaded here" if fell_back else ""),
    }


IMAGES = Recipe(
    name="images",
    prepare=prepare,
    build=build,
    describe=describe,
    qualities=(Quality("loss", "cross-entropy"), Quality("accuracy", "fraction")),
    score="test_accuracy",
)
