"""The batches and the class folders of the preprocessing program."""

from pathlib import Path

import numpy as np
import pytest

from training import preprocess


def test_generated_image_has_its_classs_color() -> None:
    batch = preprocess.generate({"id": np.arange(6, 12)}, size=32)
    assert batch["image"].shape == (6, 32, 32, 3)
    assert batch["label"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["image"].mean((1, 2)).argmax(1).tolist() == batch["label"].tolist()


def test_slow_blur_scales_and_blurs_images() -> None:
    batch = preprocess.generate({"id": np.arange(4)}, size=32)
    prepared = preprocess.slow_blur(batch, blurs=2)
    assert prepared["image"].shape == (4, 3, 32, 32)
    assert prepared["image"].dtype == np.float32
    assert 0 <= prepared["image"].min() < prepared["image"].max() <= 1
    assert prepared["image"].std((2, 3)).max() < (batch["image"] / 255).std((1, 2)).min() / 4
    assert prepared["label"].tolist() == batch["label"].tolist()


def test_a_label_is_the_image_s_folder(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        (tmp_path / name).mkdir()
    classes = preprocess.classes_in(str(tmp_path))
    paths = np.array(["bucket/cat/1.jpg", "/data/dog/2.jpg"])
    assert preprocess.label({"path": paths, "image": np.zeros(2)}, classes)["label"].tolist() == [0, 1]


def test_images_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder for each class"):
        preprocess.classes_in(str(tmp_path))
