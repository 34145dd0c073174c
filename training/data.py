"""The data sets, as tensors in memory, and the order in which the ranks see them.

Images stay uint8 until a batch is made: 60,000 of them take 47 MB and no Python runs per sample.
"""

import gzip
import math
import os
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset
from torchvision.datasets import FashionMNIST

from training.config import TrainingConfig
from training.errors import UsageError

IMAGE_SIZE = 28
REACH_SECONDS = 5.0
FASHION_MNIST_FILES = tuple(Path(name).stem for name, _ in FashionMNIST.resources)
WAYS_ON = "two ways on: --data-dir FOLDER with its four IDX files, or --dataset digits, which needs no network"


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 [n, channels, height, width], `labels` int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        """The same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set for image classification, and the pixel statistics of its training part (scaled to 0..1)."""

    name: str
    train: Split
    test: Split
    classes: int
    mean: float
    std: float

    @classmethod
    def of(cls, name: str, train: Split, test: Split, classes: int) -> "Dataset":
        """The data set of two splits; the statistics come from the training images alone."""
        counts = torch.bincount(train.images.flatten(), minlength=256).double()  # no copy of the images as floats
        levels, shares = torch.arange(256).double() / 255, counts / counts.sum()
        mean = (levels * shares).sum()
        std = ((levels - mean) ** 2 * shares).sum().sqrt()
        return cls(name, train, test, classes, mean.item(), std.item())

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.images.shape[1]

    def normalize(self, images: Tensor) -> Tensor:
        """Float images of zero mean and unit variance from uint8 ones, on the device they are on."""
        return images.float().div_(255).sub_(self.mean).div_(self.std)


def choose(config: TrainingConfig) -> str:
    """The data set that a config means, after a look at whether it can be had.

    `auto` is Fashion-MNIST if its files are here or its mirror answers within seconds, and else the digits.

    Raises:
        UsageError: The data set can't be had; the message names the ways on.
    """
    if config.dataset == "auto" and config.data_dir is None:
        return "fashion-mnist" if _cached() or not _unreachable() else "digits"
    if config.dataset not in ("auto", "fashion-mnist"):
        _refuse_data_dir(config)
        return config.dataset
    if config.data_dir is not None:
        _fashion_mnist(config)  # broken files are better found now than by every worker
    elif not _cached() and (reason := _unreachable()):
        raise UsageError(f"--dataset fashion-mnist: its download can't be reached ({reason}); {WAYS_ON}")
    return "fashion-mnist"


def load(name: str, config: TrainingConfig) -> Dataset:
    """The data set `name`, whole, on the CPU.

    Raises:
        UsageError: Its files are missing, broken or can't be downloaded.
    """
    return LOADERS[name](config)


def steps(samples: int, batch_size: int, world_size: int) -> int:
    """Optimizer steps in an epoch: enough that no rank's batch is larger than `batch_size`."""
    return math.ceil(math.ceil(samples / world_size) / batch_size)


def train_batches(split: Split, batch_size: int, epoch: int, rank: int, world_size: int, seed: int) -> list[Tensor]:
    """The indices of this rank's batches in an epoch: a new shuffle each, the same number of steps on every rank.

    Where the images don't divide by the ranks a few are repeated, as DistributedSampler does. The batches' sizes
    differ by one at most: a short last batch would weigh its images more. So from a batch size of 3 on no batch has a
    single image, which batch norm can't take.
    """
    sampler = DistributedSampler(
        TensorDataset(split.labels), num_replicas=world_size, rank=rank, shuffle=True, seed=seed
    )
    sampler.set_epoch(epoch)
    return list(torch.tensor(list(sampler)).tensor_split(steps(len(split), batch_size, world_size)))


def test_batches(split: Split, batch_size: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """The indices of this rank's share of the test set: every image on exactly one rank, none repeated."""
    yield from torch.arange(rank, len(split), world_size).split(batch_size)


def _cache() -> Path:
    """Where this node keeps what it has downloaded."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ray-on-ecs"


def _cached() -> bool:
    raw = _cache() / "FashionMNIST" / "raw"
    return all((raw / name).is_file() for name in FASHION_MNIST_FILES)


def _unreachable() -> str | None:
    """Why no mirror of Fashion-MNIST answers, or None if one does."""
    smallest = FashionMNIST.resources[-1][0]
    reason = "it has no mirror"
    for mirror in FashionMNIST.mirrors:
        try:
            with urllib.request.urlopen(mirror + smallest, timeout=REACH_SECONDS):
                return None
        except OSError as cause:
            reason = f"{mirror}: {getattr(cause, 'reason', cause)}"
    return reason


def _refuse_data_dir(config: TrainingConfig) -> None:
    if config.data_dir is not None:
        raise UsageError(
            f"--data-dir: {config.data_dir!r} is not used by --dataset {config.dataset}; leave one of them out"
        )


def _idx_files(folder: Path) -> list[Path]:
    """Fashion-MNIST's four files in a folder, in torchvision's `FashionMNIST/raw` below it, or gzipped."""
    for place in (folder, folder / "FashionMNIST" / "raw"):
        found = [next((p for p in (place / n, place / f"{n}.gz") if p.is_file()), None) for n in FASHION_MNIST_FILES]
        if all(found):
            return [path for path in found if path]
    wanted = ", ".join(FASHION_MNIST_FILES)
    raise UsageError(f"--data-dir: {str(folder)!r} must hold {wanted}, each as it is or with .gz; it does not")


def _fashion_mnist(config: TrainingConfig) -> Dataset:
    if config.data_dir is None:
        return _read_fashion_mnist(_download())
    with tempfile.TemporaryDirectory() as root:
        _unpack(_idx_files(Path(config.data_dir)), Path(root) / "FashionMNIST" / "raw")
        return _read_fashion_mnist(Path(root))


def _download() -> Path:
    """Download once a node: the first process does, the others wait for its lock."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    patience = socket.getdefaulttimeout()
    with FileLock(cache / "download.lock"):
        try:
            socket.setdefaulttimeout(30)  # torchvision sets none: a mirror that hangs would hang the run
            FashionMNIST(cache, download=True)
        except (OSError, RuntimeError) as cause:
            raise UsageError(f"--dataset fashion-mnist: the download failed ({cause}); {WAYS_ON}") from cause
        finally:
            socket.setdefaulttimeout(patience)
    return cache


def _unpack(files: list[Path], raw: Path) -> None:
    """Lay the files out as torchvision expects them."""
    raw.mkdir(parents=True)
    for path in files:
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rb") as source, open(raw / path.name.removesuffix(".gz"), "wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, EOFError) as cause:
            raise UsageError(f"--data-dir: {str(path)!r} can't be read ({cause}); fetch it again") from cause


def _read_fashion_mnist(root: Path) -> Dataset:
    try:
        parts = [FashionMNIST(root, train=train) for train in (True, False)]
    except (OSError, ValueError, RuntimeError, AssertionError) as cause:
        reason = f"{type(cause).__name__} {cause}".strip()
        raise UsageError(f"the Fashion-MNIST files are broken ({reason}): no IDX files; fetch them again") from cause
    splits = [Split(part.data.unsqueeze(1), part.targets) for part in parts]
    for split in splits:
        if len(split.images) != len(split.labels):
            raise UsageError(
                f"{len(split.images)} Fashion-MNIST images have {len(split.labels)} labels; fetch them again"
            )
    return Dataset.of("fashion-mnist", *splits, classes=len(FashionMNIST.classes))


def _digits(config: TrainingConfig) -> Dataset:
    """scikit-learn's 1,797 handwritten digits (UCI), 8x8 in 17 greys, scaled up to 28x28; a fifth is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float().unsqueeze(1) * (255 / 16)
    images = torch.nn.functional.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split for every seed
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    images = images.round().to(torch.uint8)
    return Dataset.of("digits", Split(images[train], labels[train]), Split(images[test], labels[test]), classes=10)


def _synthetic(config: TrainingConfig) -> Dataset:
    """Noise around one random picture a class: any number of images, and a model can learn them."""
    classes = 10
    generator = torch.Generator().manual_seed(config.seed)
    pictures = torch.randint(0, 256, (classes, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)

    def split(n: int) -> Split:
        labels = torch.arange(n) % classes
        noise = torch.randint(0, 256, (n, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)
        return Split(pictures[labels] // 2 + noise // 2, labels)

    return Dataset.of("synthetic", split(config.samples), split(max(classes, config.samples // 6)), classes)


# DATASETS in config.py has these names and auto.
LOADERS: dict[str, Callable[[TrainingConfig], Dataset]] = {
    "fashion-mnist": _fashion_mnist,
    "digits": _digits,
    "synthetic": _synthetic,
}
