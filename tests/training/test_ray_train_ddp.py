"""The data and the model of the Ray Train job; tests/commands/test_programs.py trains with it."""

from pathlib import Path

import pytest
import torch

from tests.photographs import write_photographs
from tests.small_images import write_small_images
from training import ray_train_ddp


def test_images_of_a_folder_fit_the_model(tmp_path: Path) -> None:
    data = ray_train_ddp.load_data(str(write_small_images(tmp_path, 20, 10)))
    assert (len(data.train[1]), len(data.test[1])) == (20, 10)
    [mean], [std] = data.mean, data.std
    images = (data.train[0][:4] - mean) / std
    with torch.no_grad():
        assert ray_train_ddp.build_model().eval()(images).shape == (4, 10)


def test_photographs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs(tmp_path, 5)
    with pytest.raises(SystemExit) as end:
        ray_train_ddp.load_data(str(tmp_path))
    assert end.value.code == 2
    assert "lacks FashionMNIST/raw/; image_classifier.py trains on photographs" in capsys.readouterr().err
