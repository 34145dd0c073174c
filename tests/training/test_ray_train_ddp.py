"""The storage and the data of the program on Ray Train."""

import argparse
import struct
from pathlib import Path

import pytest
import torch

from training import ray_train_ddp


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("stack-storage-bucket-1a2b3c", "s3://stack-storage-bucket-1a2b3c"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("./results", "{here}/results"),
        ("/results", "/results"),
        ("existing", "{here}/existing"),
    ],
)
def test_a_bucket_or_folder_becomes_a_storage_path(
    given: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "existing").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ray_train_ddp.storage_path(given) == path.format(here=tmp_path)


@pytest.mark.parametrize(("data", "numbers"), [("synthetic", (100, 20)), ("digits", (1497, 300))])
def test_data_without_network(data: str, numbers: tuple[int, int]) -> None:
    parts = ray_train_ddp.load({"data": data, "synthetic": 100})
    assert tuple(map(len, parts)) == numbers
    images, labels = parts[0].tensors
    assert images.shape[1:] == (1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(10))


def test_fashion_mnist_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.FashionMNIST.mirrors", ["http://127.0.0.1:9/"])
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):  # http://yann.lecun.com/exdb/mnist has the format
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">BBBBIII", 0, 0, 8, 3, 20, 28, 28) + bytes(20 * 784)
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 20) + bytes([*range(10)] * 2))
    args = argparse.Namespace(synthetic=None, data_dir=str(tmp_path))
    data = ray_train_ddp.choose_data(argparse.ArgumentParser(), args)
    assert data == "fashion-mnist"
    train, test = ray_train_ddp.load({"data": data, "data_dir": str(tmp_path)})
    assert (len(train), len(test)) == (20, 20)
    assert train[3][0].shape == (1, 28, 28)


def test_digits_replace_missing_fashion_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchvision.datasets.FashionMNIST.mirrors", ["http://127.0.0.1:9/"])
    monkeypatch.setenv("HOME", str(tmp_path))
    args = argparse.Namespace(synthetic=None, data_dir=ray_train_ddp.DATA_DIR)
    assert ray_train_ddp.choose_data(argparse.ArgumentParser(), args) == "digits"
    assert "training on scikit-learn's handwritten digits" in capsys.readouterr().out
