import gzip
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_on_ecs.errors import UsageError
from tests.aws import BUCKET
from training.recipes.images import datasets, recipe
from training.recipes.images.config import DATASETS, FOLDER, ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.fashion_mnist import FILES


def idx(values: torch.Tensor) -> bytes:
    """The IDX format of MNIST: a magic number with the rank, the sizes, the bytes."""
    return struct.pack(f">I{values.dim()}I", 0x0800 + values.dim(), *values.shape) + values.numpy().tobytes()


def write_fashion_mnist(folder: Path, compress: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        n = 20 if name.startswith("train") else 10
        values = torch.arange(n).to(torch.uint8) % 10
        if "images" in name:
            values = values.reshape(n, 1, 1).expand(n, 28, 28).contiguous()
        content = idx(values)
        (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No mirror can be reached and nothing has been downloaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torchvision.datasets.FashionMNIST.mirrors", ["http://127.0.0.1:9/"])


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_from_a_folder_gzipped_or_not(tmp_path: Path, compress: bool, below: str) -> None:
    write_fashion_mnist(tmp_path / below, compress)
    dataset = datasets.load("fashion-mnist", ImageConfig(data_dir=str(tmp_path)))
    assert dataset.train.images.shape == (20, 1, 28, 28), "images are [n, channels, height, width]"
    assert dataset.train.images.dtype == torch.uint8, "images stay uint8 until a batch is made"
    assert dataset.test.labels.tolist() == list(range(10)), "labels keep their order"
    assert dataset.train.images[7].unique().tolist() == [7], "each image belongs to its label"


def test_a_folder_without_the_files_is_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data-dir.*train-images-idx3-ubyte"):
        datasets.resolve_dataset(ImageConfig(data_dir=str(tmp_path)))


def test_fashion_mnist_is_fetched_from_a_bucket_once(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    write_fashion_mnist(tmp_path / "here", compress=True)
    for file in (tmp_path / "here").iterdir():
        s3.put_object(Bucket=BUCKET, Key=f"fashion/{file.name}", Body=file.read_bytes())
    config = ImageConfig(data_dir=f"s3://{BUCKET}/fashion")
    config = recipe.prepare(config)
    assert config.data_dir == f"s3://{BUCKET}/fashion", "it is no path"
    assert datasets.load("fashion-mnist", config).test.labels.tolist() == list(range(10))
    assert capsys.readouterr().out.count("fetching ") == 1, "the driver's node may be a worker's, too"


@pytest.mark.parametrize(
    ("address", "line"),
    [
        (f"s3://{BUCKET}/nowhere", f"--data-dir: there is nothing at s3://{BUCKET}/nowhere"),
        ("s3://no-such-bucket-at-all/x", "--data-dir: "),
        ("gs://bucket/x", "--data-dir: 'gs://bucket/x' can't be read (it is neither a folder nor a bucket); give a"),
    ],
)
@pytest.mark.usefixtures("s3")
def test_a_bucket_without_the_files_is_refused_in_a_line(address: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        datasets.resolve_dataset(ImageConfig(data_dir=address))
    assert str(refused.value).startswith(line)


def test_a_broken_archive_is_refused_by_its_name(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, compress=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz.*fetch it again"):
        datasets.load("fashion-mnist", ImageConfig(data_dir=str(tmp_path)))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, compress=False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="broken"):
        datasets.resolve_dataset(ImageConfig(data_dir=str(tmp_path)))


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, compress=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(19, dtype=torch.uint8)))
    with pytest.raises(UsageError, match="20 Fashion-MNIST images have 19 labels"):
        datasets.load("fashion-mnist", ImageConfig(data_dir=str(tmp_path)))


@pytest.mark.usefixtures("offline")
def test_an_unreachable_download_names_the_two_ways_on() -> None:
    with pytest.raises(UsageError, match=r"can't be reached.*--data-dir.*--dataset digits"):
        datasets.resolve_dataset(ImageConfig(dataset="fashion-mnist"))


@pytest.mark.usefixtures("offline")
def test_auto_falls_back_to_the_digits_without_a_network() -> None:
    assert datasets.resolve_dataset(ImageConfig(dataset="auto")) == "digits", "a laptop without network still trains"


@pytest.mark.usefixtures("offline")
def test_auto_takes_fashion_mnist_from_a_given_folder(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, compress=True)
    assert datasets.resolve_dataset(ImageConfig(dataset="auto", data_dir=str(tmp_path))) == "fashion-mnist"


@pytest.mark.usefixtures("offline")
def test_a_download_of_an_earlier_run_needs_no_network(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "cache" / "ray-on-ecs" / "FashionMNIST" / "raw", compress=False)
    config = ImageConfig(dataset="auto")
    assert datasets.resolve_dataset(config) == "fashion-mnist", "files that are here are used"
    assert len(datasets.load("fashion-mnist", config).train) == 20


def test_a_data_dir_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(UsageError, match="not used by --dataset digits"):
        datasets.resolve_dataset(ImageConfig(dataset="digits", data_dir="/somewhere"))


def test_a_data_set_of_ones_own_needs_a_loader_and_a_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))
    object.__setattr__(config := ImageConfig(), "dataset", "mine")
    monkeypatch.setitem(datasets.LOADERS, "mine", lambda config: Dataset.from_splits("mine", split, split, classes=2))
    assert datasets.resolve_dataset(config) == "mine", "another data set would be trained on"
    assert datasets.load("mine", config).channels == 3


def test_every_data_set_that_can_be_asked_for_can_be_loaded() -> None:
    assert {*datasets.LOADERS, "auto", FOLDER} == set(DATASETS), "--help offers what there is"


def test_digits_are_real_images_of_28_by_28(digits: Dataset) -> None:
    assert len(digits.train) + len(digits.test) == 1797, "scikit-learn has 1,797 of them"
    assert digits.train.images.shape[1:] == (1, 28, 28)
    assert digits.train.images.max() == 255, "the greys are scaled to bytes"
    assert set(digits.test.labels.tolist()) == set(range(10)), "every class is tested"


def test_normalized_images_have_zero_mean_and_unit_variance(digits: Dataset) -> None:
    images = digits.normalize(digits.train.images)
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-5)


def test_synthetic_data_have_the_size_asked_for_and_are_the_same_for_a_seed() -> None:
    first, again, other = (datasets.load("synthetic", ImageConfig(samples=100, seed=s)) for s in (1, 1, 2))
    assert len(first.train) == 100
    assert torch.equal(first.train.images, again.train.images), "each worker makes the set itself: it must be one set"
    assert not torch.equal(first.train.images, other.train.images)
