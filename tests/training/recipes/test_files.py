"""Images in files: a folder for each class, in memory or read anew in each epoch."""

import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ray_on_ecs.errors import UsageError
from tests.aws import BUCKET
from tests.training.ranks import Ranks
from training.engine.feed import in_threads, thread_feed
from training.recipes.images import datasets, files, models, recipe
from training.recipes.images.augment import Augmentation
from training.recipes.images.config import FOLDER, ImageConfig
from training.recipes.images.loader import Batch, BatchLoader
from training.recipes.images.trainer import ImageTrainer

CPU = torch.device("cpu")
TRAIN, TEST, SIZE, BATCH = 40, 12, 16, 4
COLORS = ((220, 40, 40), (40, 40, 220))
Config = Callable[..., ImageConfig]


@pytest.fixture(autouse=True)
def linear_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "linear", linear)


def linear(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * SIZE**2, classes))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise around a color for each of two classes, in pictures of several sizes and formats."""
    folder = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("test", TEST)):
        for number in range(count):
            label = number % 2
            pixels = numbers.integers(-30, 30, (30 + number, 60 - number // 2, 3)) + COLORS[label]
            name = f"{number}.jpg" if number % 3 else f"{number}.PNG"
            path = folder / part / ("red", "blue")[label] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return folder


@pytest.fixture
def of_folder(config: Config, pictures: Path) -> Config:
    """A valid config of the pictures with the given settings changed."""
    given = {"model": "linear", "dataset": FOLDER, "data_dir": str(pictures), "image_size": SIZE, "batch_size": BATCH}

    def build(**settings: Any) -> ImageConfig:
        return config(**{**given, "epochs": 2, "stream": "on", **settings})

    return build


def loader_of(config: ImageConfig, rank: int = 0, ranks: int = 1, feed: Any = in_threads) -> BatchLoader:
    return BatchLoader(datasets.load(FOLDER, config, feed), config, rank, ranks, CPU, feed)


def epoch_of(loader: BatchLoader, epoch: int, first_step: int = 0) -> list[Batch]:
    return [microbatch for microbatches in loader.train(epoch, first_step) for microbatch in microbatches]


def are_equal(some: list[Batch], others: list[Batch]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for pair in pairs for one, other in zip(*pair, strict=True))


def test_they_are_found_with_their_classes(of_folder: Config) -> None:
    dataset = datasets.load(FOLDER, of_folder())
    assert (len(dataset.train), len(dataset.test), dataset.classes, dataset.channels) == (TRAIN, TEST, 2, 3)
    assert dataset.nbytes == (TRAIN + TEST) * 3 * SIZE**2
    images, labels = next(loader_of(of_folder()).test())
    reddest = images.mean(dim=(2, 3)).argmax(dim=1)
    assert torch.equal(reddest == 0, labels == 1), "blue is the first of the classes, red the second"


def test_every_format_and_size_becomes_the_middle_square(tmp_path: Path) -> None:
    for number, (mode, size) in enumerate([("RGB", (90, 30)), ("L", (30, 90)), ("RGBA", (32, 32)), ("P", (64, 40))]):
        Image.new(mode, size, 255).save(tmp_path / f"{number}.png")
    white = Image.new("RGB", (300, 100))
    white.paste((255, 255, 255), (100, 0, 200, 100))
    white.save(tmp_path / "wide.jpg", quality=95)
    made = files.decode(files.FilePart(str(tmp_path), [str(tmp_path / "wide.jpg"), str(tmp_path / "0.png")], 20))
    assert made.shape == (2, 3, 20, 20)
    assert made[0, :, 2:-2, 2:-2].min() > 250, "its left and right thirds, which are black, are cut off"
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    assert files.decode(files.FilePart(str(tmp_path), paths, 20)).shape == (4, 3, 20, 20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_streamed_or_in_memory_they_are_the_same_batches(of_folder: Config, ranks: int) -> None:
    streamed, in_memory = (of_folder(stream=stream, max_shift=2) for stream in ("on", "off"))
    for rank in range(ranks):
        one, other = (loader_of(each, rank, ranks, thread_feed(3)) for each in (streamed, in_memory))
        assert are_equal(epoch_of(one, 1), epoch_of(other, 1))
        assert are_equal(list(one.test()), list(other.test()))


def test_a_run_goes_on_streamed_or_in_memory(of_folder: Config) -> None:
    streamed, in_memory = (datasets.load(FOLDER, of_folder(stream=stream)) for stream in ("on", "off"))
    assert streamed.fingerprint == in_memory.fingerprint
    assert in_memory.to(CPU).fingerprint == streamed.fingerprint
    config = of_folder(model="linear", stream="auto")
    summary = ImageTrainer(config, in_memory, CPU).data_summary
    assert ImageTrainer(config, streamed, CPU).data_summary == summary


def test_a_part_takes_only_its_own_numbers_to_a_helper(of_folder: Config) -> None:
    loader = loader_of(of_folder(random_crop="on", max_shift=2))
    order = torch.arange(TRAIN).repeat(5000)
    generator = torch.Generator().manual_seed(0)
    crops, changes = files.draw_crops(len(order), generator), Augmentation.draw(len(order), True, 2, generator)
    sizes: list[int] = []

    def feed(parts: Iterable[files.FilePart], decode: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
        for part in parts:
            sizes.append(len(pickle.dumps(part)))
            yield decode(part)

    loader.feed = feed
    [_] = loader._take(loader.dataset.train, order, [slice(BATCH, 2 * BATCH)], changes, crops)
    assert sizes[0] < 4000 < crops.nbytes


def build_on_rank(rank: int, ranks: int, config: ImageConfig, folders: list[str]) -> str:
    models.MODELS["linear"] = linear
    own = replace(config, data_dir=folders[rank])
    try:
        ImageTrainer(own, datasets.load(FOLDER, own), CPU)
    except UsageError as error:
        return str(error)
    return "alike"


def test_nodes_with_other_images_are_refused(
    of_folder: Config, pictures: Path, tmp_path: Path, on_ranks: Ranks
) -> None:
    copy, changed = (shutil.copytree(pictures, tmp_path / name) for name in ("copy", "changed"))
    next((changed / "train" / "red").iterdir()).unlink()
    settings = of_folder(batch_size=2)
    assert on_ranks(2, build_on_rank, settings, [str(pictures), str(copy)]) == ["alike"] * 2
    for said in on_ranks(2, build_on_rank, settings, [str(pictures), str(changed)]):
        assert said.startswith("--data-dir: ")
        assert said.endswith("has not the same images on every node; give s3://bucket/prefix")


def test_a_bucket_has_the_same_batches(of_folder: Config, pictures: Path, s3: Any) -> None:
    for file in pictures.rglob("*.*"):
        s3.upload_file(str(file), BUCKET, f"pictures/{file.relative_to(pictures)}")
    there, here = of_folder(data_dir=f"s3://{BUCKET}/pictures", random_crop="on"), of_folder(random_crop="on")
    assert are_equal(epoch_of(loader_of(there), 0), epoch_of(loader_of(here), 0))
    assert datasets.load(FOLDER, there).fingerprint == datasets.load(FOLDER, here).fingerprint


def test_random_crops_are_new_in_each_epoch_and_alike_on_any_number_of_ranks(of_folder: Config) -> None:
    alone = loader_of(of_folder(random_crop="on"))
    first, second = epoch_of(alone, 0), epoch_of(alone, 1)
    assert not are_equal(first, second)
    assert are_equal(first[5:], epoch_of(alone, 0, first_step=5)), "wherever the epoch is entered"
    halves = [epoch_of(loader_of(of_folder(random_crop="on", batch_size=BATCH // 2), rank, 2), 0) for rank in (0, 1)]
    pairs = zip(*halves, strict=True)
    assert are_equal(first, [(torch.cat([a, b]), torch.cat([c, d])) for (a, c), (b, d) in pairs])


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 1, 1), (0.5, 0.5, 0.5, 0.5)])
@pytest.mark.parametrize(("width", "height"), [(100, 100), (1000, 1), (1, 1), (3, 500)])
def test_a_crop_is_inside_the_image(numbers: tuple[float, ...], width: int, height: int) -> None:
    left, upper, right, lower = files._cut(width, height, numbers)
    assert 0 <= left < right <= width + 1e-6
    assert 0 <= upper < lower <= height + 1e-6


class Seen:
    """A feed that prepares no part before it is needed, and notes the files."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()

    def __call__(self, parts: Iterable[files.FilePart], prepare: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
        for part in parts:
            self.paths.update(part.paths)
            yield prepare(part)


class CutOff(Exception):
    pass


def train_until(trainer: ImageTrainer, step: int) -> None:
    def cut(done: int, steps: int) -> None:
        if done == step:
            raise CutOff

    with pytest.raises(CutOff):
        trainer.run_epoch(cut)


def trained(rank: int, ranks: int, config: ImageConfig, step: int | None) -> tuple[list[Any], Counter[str]]:
    """The losses of all epochs, the first of which is cut and continued after `step`; and what was seen in that one."""
    models.MODELS["linear"] = linear
    seen, rest = Seen(), Seen()
    build = partial(datasets.load, FOLDER, config)
    trainer = ImageTrainer(config, build(), CPU, seen)
    if step is not None:
        train_until(trainer, step)
        state = trainer.state_dict()
        trainer = ImageTrainer(config, build(), CPU, rest)
        trainer.model.load_state_dict(state["model"])
        trainer.load_state_dict(state)
    losses = [trainer.run_epoch()["train_loss"] for _ in range(config.epochs)]
    return losses, seen.paths + rest.paths


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_cut_in_an_epoch_sees_each_image_once(of_folder: Config, ranks: int, on_ranks: Ranks) -> None:
    settings = of_folder(random_crop="on", epochs=1, batch_size=BATCH // ranks)
    cut = on_ranks(ranks, trained, settings, 4)
    whole = on_ranks(ranks, trained, settings, None)
    assert [losses for losses, _ in cut] == [losses for losses, _ in whole], "to the last digit"
    once = sum((paths for _, paths in whole), Counter())
    assert {count for path, count in once.items() if "/train/" in path} == {1}
    assert len([path for path in once if "/train/" in path]) == TRAIN
    twice = sum((paths for _, paths in cut), Counter())
    assert twice == once, "no image again, and none left out"


def test_it_learns(of_folder: Config) -> None:
    trainer = ImageTrainer(of_folder(random_crop="on", epochs=6), datasets.load(FOLDER, of_folder()), CPU)
    for _ in range(6):
        metrics = trainer.run_epoch()
    assert metrics["test_accuracy"] == 1


def test_without_parts_one_of_ten_is_for_testing(tmp_path: Path, of_folder: Config) -> None:
    for number in range(60):
        path = tmp_path / f"class-{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20)).save(path)
    (tmp_path / "class-0" / "readme.txt").write_text("is no image")
    dataset = datasets.load(FOLDER, of_folder(data_dir=str(tmp_path)))
    assert len(dataset.train) + len(dataset.test) == 60
    assert 1 <= len(dataset.test) <= 15
    assert dataset.classes == 3


def test_a_grey_image_of_16_bits_keeps_its_greys(tmp_path: Path) -> None:
    grey = np.linspace(0, 2**16 - 1, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    [made] = files.decode(files.FilePart(str(tmp_path), [str(tmp_path / "grey.png")], 32))
    assert np.abs(made[0].astype(int) - (grey >> 8)).max() <= 1


def test_what_is_left_over_between_the_images_is_not_read(pictures: Path, tmp_path: Path, of_folder: Config) -> None:
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    for name in (".ipynb_checkpoints/1.png", "__MACOSX/red/._1.jpg", "train/.thumbs/1.png", "train/red/._1.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"no image")
    found = datasets.load(FOLDER, of_folder(data_dir=str(folder)))
    assert found.classes == 2
    assert found.fingerprint == datasets.load(FOLDER, of_folder()).fingerprint


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train/1.png", "test/2.png"], "has 0 training and 0 test images of 0 classes"),
        (["train/cat/1.png", "train/dog/2.png", "val/cats/3.png"], "has no training images of cats, but test images"),
        ([*(f"cat/{number}.png" for number in range(20)), "dog/9.png"], "no training images of dog, .*more images"),
        (["cat.png"], "has 0 training and 0 test images"),
    ],
    ids=["no classes", "other names", "a single image", "one file"],
)
def test_folders_that_are_no_classes_are_refused(
    tmp_path: Path, of_folder: Config, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    given = tmp_path / names[0] if len(names) == 1 else tmp_path
    with pytest.raises(UsageError, match=message):
        datasets.resolve_dataset(of_folder(data_dir=str(given)))


def test_the_header_says_what_is_in_the_folder(of_folder: Config, pictures: Path) -> None:
    many, few = (recipe.describe(each, each)["data"] for each in (of_folder(), of_folder(batch_size=16, num_workers=2)))
    assert many == f"{pictures}: {TRAIN} training and {TEST} test images of 2 classes (blue, red)"
    assert few.endswith("; an epoch has only 1 step of 32 images, and leaves 8 out: a smaller --batch-size makes more")
    summary = ImageTrainer(of_folder(), datasets.load(FOLDER, of_folder(stream="off")), CPU).data_summary
    assert summary["class_names"] == ["blue", "red"]


def test_what_would_take_much_memory_stays_in_its_files(of_folder: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = of_folder(stream="auto")
    assert not isinstance(datasets.load(FOLDER, auto), files.FileDataset)
    assert isinstance(datasets.load(FOLDER, replace(auto, random_crop="on")), files.FileDataset)
    monkeypatch.setattr(datasets, "MAX_MEMORY_FRACTION", 1e-9)
    assert isinstance(datasets.load(FOLDER, auto), files.FileDataset)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no image", "is no image that can be decoded"), (b"", "is no image"), (None, "can't be read")],
    ids=["text", "nothing", "gone"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "broken.jpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"--data-dir: .*broken.jpg {reason}"):
        files.decode(files.FilePart(str(tmp_path), [str(path)], SIZE))


def test_a_folder_without_classes_is_refused(tmp_path: Path, of_folder: Config) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "alone.png")
    message = r"has 0 training and 0 test images of 0 classes, and 1 images that are in no class's folder; it must hold"
    with pytest.raises(UsageError, match=message):
        datasets.resolve_dataset(of_folder(data_dir=str(tmp_path)))
    with pytest.raises(UsageError, match=r"--data-dir: there is nothing at '.*nowhere'; give a folder"):
        datasets.resolve_dataset(of_folder(data_dir=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_dir": None}, "--dataset: 'folder' needs --data-dir"),
        ({"random_crop": "on", "stream": "off"}, "--stream: 'off' is not allowed with --random-crop on"),
        ({"dataset": "digits", "stream": "on"}, "--stream: 'on' is for --dataset folder; digits stays in memory"),
        ({"dataset": "digits", "random_crop": "on"}, "--random-crop: 'on' is for --dataset folder"),
        ({"dataset": "digits"}, "--image-size: 16 is for --dataset folder; leave it out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(of_folder: Config, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of_folder(**{"stream": "auto", **settings})
