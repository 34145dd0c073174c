"""Folders of photographs: each is decoded once per epoch, and a fault is one line."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from ray_on_ecs import DistributedSampler
from ray_on_ecs.recipes.image_batches import MicroBatches
from ray_on_ecs.recipes.ranks import Ranks
from tests.lazy import Lazy
from tests.photographs import COLORS, write_photographs
from tests.training.refused import refused

photographs = Lazy("ray_on_ecs.recipes.photographs")
images = Lazy("ray_on_ecs.recipes.images")
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photographs(tmp_path / "colors", 4)


def train(folder: Path, seed: int = 0) -> torch.Tensor:
    data = images.load_images(str(folder), 16)
    micro_batches = MicroBatches(DistributedSampler(data), len(data), 4, 1)
    return torch.cat([part for part, _ in data.train_batches(micro_batches, CPU, seed=seed, flip=False)])


def test_classes_are_folders(folder: Path) -> None:
    data = images.load_images(str(folder), 16)
    assert (data.name, data.class_names, data.shape, len(data)) == ("colors", ["green", "red"], (3, 16, 16), 8)
    [(pixels, labels)] = data.test_batches(16, Ranks(0, 1, CPU))
    colors = pixels.mean((2, 3)) * torch.tensor(data.std) + torch.tensor(data.mean)
    for color, label in zip(colors, labels, strict=True):
        torch.testing.assert_close(color, torch.tensor(COLORS[data.class_names[label]]).float(), atol=35, rtol=0)


def test_crops_depend_on_the_seed(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "noise").mkdir(parents=True)
        pixels = torch.randint(256, (60, 40, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        for number in range(4):
            Image.fromarray(pixels.numpy()).save(tmp_path / part / "noise" / f"{number}.png")
    first = train(tmp_path)
    assert len({tuple(image.flatten().tolist()) for image in first}) == 4, "each has another crop"
    assert torch.equal(first, train(tmp_path))
    assert not torch.equal(first, train(tmp_path, seed=1))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_every_mode_have_three_channels(folder: Path, mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new(mode, (40, 40)).save(folder / "train" / "red" / f"another.{suffix}")
    assert train(folder).shape[1:] == (3, 16, 16)


def test_a_folder_that_can_not_be_used_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test" / "red").rename(folder / "test" / "wolf")
    line = refused(capsys, train, folder)
    assert line.endswith("can't be read (train has the class 'red', which test lacks)")
    (folder / "test" / "wolf").rename(folder / "test" / "red")
    (folder / "test" / "wolf").mkdir()
    assert "Found no valid file for the classes wolf" in refused(capsys, train, folder)
    (folder / "test" / "wolf" / "1.jpg").write_bytes(b"")
    assert "test has the class 'wolf', which train lacks" in refused(capsys, train, folder)
    (folder / "test").rename(folder / "val")
    assert "it has neither FashionMNIST/raw/ nor train/CLASS/" in refused(capsys, train, folder)


@pytest.mark.parametrize("kept", [0, 100, 400])
def test_a_broken_image_is_one_line(folder: Path, kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "train" / "red" / "2.jpg"
    file.write_bytes(file.read_bytes()[:kept])
    line = refused(capsys, train, folder)
    assert f"'{file}' is not an image that can be read (" in line
    assert line.endswith("mend or delete it")


@pytest.mark.parametrize(
    ("cpus", "local_ranks", "loaders"), [(2, 1, 1), (2, 2, 1), (8, 1, 7), (96, 8, 11), (192, 1, 16)]
)
def test_ranks_of_a_node_share_its_cpus(
    cpus: int, local_ranks: int, loaders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photographs, "usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    assert photographs.loader_processes() == loaders
