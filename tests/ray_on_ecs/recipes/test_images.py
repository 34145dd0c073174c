"""Data sets of images by name or folder."""

import struct
from pathlib import Path

import pytest
import torch

from tests.lazy import Lazy
from tests.training.refused import refused

images = Lazy("ray_on_ecs.recipes.images")


def idx(values: torch.Tensor) -> bytes:
    return bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + values.numpy().tobytes()


@pytest.fixture
def torchvision_folder(tmp_path: Path) -> Path:
    (raw := tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    numbers = torch.arange(6 * 28 * 28).to(torch.uint8).reshape(6, 28, 28)
    for name in images.FILES:
        (raw / name).write_bytes(idx(numbers if "images" in name else torch.arange(6, dtype=torch.uint8)))
    return tmp_path


def test_fashion_mnist_in_torchvisions_folder(torchvision_folder: Path) -> None:
    data = images.load_images(str(torchvision_folder))
    for pixels, labels in (data.train, data.test):
        assert torch.equal(pixels, torch.arange(6 * 28 * 28).to(torch.uint8).reshape(6, 1, 28, 28))
        assert labels.tolist() == list(range(6))
        assert labels.dtype == torch.int64
    assert (data.name, data.shape) == ("fashion-mnist", (1, 28, 28))


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x03", None])
def test_broken_or_missing_files_cost_one_line(
    torchvision_folder: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = torchvision_folder / "FashionMNIST" / "raw" / images.FILES[2]
    file.unlink() if content is None else file.write_bytes(content)
    line = refused(capsys, images.load_images, str(torchvision_folder))
    assert line.startswith(f"argument --data: {str(torchvision_folder)!r} can't be read (")


def test_digits_are_the_choice_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(images, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(images.FashionMNIST, "mirrors", [(tmp_path / "nothing").as_uri() + "/"])
    data = images.load_images("auto")
    assert (data.name, len(data), len(data.test[1]), data.can_flip) == ("digits", 1438, 359, False)
    monkeypatch.setattr(images.FashionMNIST, "mirrors", [tmp_path.as_uri() + "/"])
    (tmp_path / images.FashionMNIST.resources[-1][0]).touch()  # now a mirror answers
    assert images.fashion_mnist_or_digits() == "fashion-mnist"
