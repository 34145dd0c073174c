"""The data sets, as tensors in memory; batches.py makes batches of them.

Images stay uint8 until a batch is made: 60,000 of them take 47 MB and no Python runs per sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from training.config import TrainingConfig
from training.errors import UsageError

IMAGE_SIZE = 28


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 [n, channels, height, width], `labels` int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]

    def to(self, device: torch.device) -> "Split":
        """The same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set for image classification.

    Attributes:
        name: What it is called.
        train: The images that a model learns from.
        test: The images that it is tested on.
        classes: Number of classes.
        mean: Mean of the training part's pixels, scaled to 0..1.
        std: Their standard deviation.
        mirrors: Whether an image and its mirror image are of one class, so that training may turn images around.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: float
    std: float
    mirrors: bool = False

    @classmethod
    def of(cls, name: str, train: Split, test: Split, classes: int, mirrors: bool = False) -> "Dataset":
        """The data set of two splits; the statistics come from the training images alone."""
        counts = torch.bincount(train.images.flatten(), minlength=256).double()  # no copy of the images as floats
        levels, shares = torch.arange(256).double() / 255, counts / counts.sum()
        mean = (levels * shares).sum()
        std = ((levels - mean) ** 2 * shares).sum().sqrt()
        return cls(name, train, test, classes, mean.item(), std.item(), mirrors)

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.images.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory that images and labels take, in bytes."""
        return sum(part.nbytes for split in (self.train, self.test) for part in (split.images, split.labels))

    def to(self, device: torch.device) -> "Dataset":
        """The same data set on another device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def normalize(self, images: Tensor) -> Tensor:
        """Float images of zero mean and unit variance from uint8 ones, on the device they are on."""
        return images.float().sub_(255 * self.mean).div_(255 * self.std)


def choose(config: TrainingConfig) -> str:
    """The data set that a config means, after a look at whether it can be had.

    `auto` is Fashion-MNIST if its files are here or its mirror answers within seconds, and else the digits.

    Raises:
        UsageError: The data set can't be had; the message names the ways on.
    """
    if config.dataset not in ("auto", "fashion-mnist"):
        _refuse_data_dir(config)
        return config.dataset
    from training import fashion_mnist  # imports torchvision, which takes seconds

    if config.data_dir is not None:
        fashion_mnist.load(config)  # broken files are better found now than by every worker
    elif reason := fashion_mnist.unreachable():
        if config.dataset == "auto":
            return "digits"
        raise UsageError(f"--dataset fashion-mnist: its download can't be reached ({reason}); {fashion_mnist.WAYS_ON}")
    return "fashion-mnist"


def load(name: str, config: TrainingConfig) -> Dataset:
    """The data set `name`, whole, on the CPU.

    Raises:
        UsageError: Its files are missing, broken or can't be downloaded.
    """
    return LOADERS[name](config)


def _refuse_data_dir(config: TrainingConfig) -> None:
    if config.data_dir is not None:
        raise UsageError(
            f"--data-dir: {config.data_dir!r} is not used by --dataset {config.dataset}; leave one of them out"
        )


def _fashion_mnist(config: TrainingConfig) -> Dataset:
    from training import fashion_mnist

    return fashion_mnist.load(config)


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
