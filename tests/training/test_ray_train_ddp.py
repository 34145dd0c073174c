"""The data and the model of the Ray Train job; tests/commands/test_programs.py trains with it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from tests.photographs import write_photographs
from tests.small_images import write_small_images
from tests.training.refused import refused
from training import ray_train_ddp


def test_images_of_a_folder_fit_the_model(tmp_path: Path) -> None:
    data = ray_train_ddp.load_data(str(write_small_images(tmp_path, 20, 10)))
    assert (len(data.train[1]), len(data.test[1])) == (20, 10)
    [mean], [std] = data.mean, data.std
    images = (data.train[0][:4] - mean) / std
    with torch.no_grad():
        assert ray_train_ddp.build_model(1, 10).eval()(images).shape == (4, 10)


def test_photographs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs(tmp_path, 5)
    line = refused(capsys, ray_train_ddp.load_data, str(tmp_path))
    assert line.endswith("lacks FashionMNIST/raw/; image_classifier.py trains on photographs")


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_ray_keeps_the_best_and_the_last_checkpoint(tmp_path: Path) -> None:
    """As main configures it; this part of Ray is not public, and the documentation does not mention the last one."""
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
    config: Any = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute=ray_train_ddp.BEST)

    async def report_all() -> None:
        manager = CheckpointManager(config, storage)
        for epoch, accuracy in enumerate((0.5, 0.9, 0.7, 0.6)):
            (folder := Path(storage.experiment_fs_path, f"checkpoint_{epoch}")).mkdir(parents=True)
            checkpoint: Any = Checkpoint(str(folder), storage.storage_filesystem)
            manager.register_checkpoint(_TrainingReport(checkpoint, {ray_train_ddp.BEST: accuracy}, validation=False))

    asyncio.run(report_all())
    assert {path.name for path in tmp_path.glob("run/checkpoint_?")} == {"checkpoint_1", "checkpoint_3"}
