"""An image data set: as tensors in memory, or as files that are decoded when they are needed (files.py).

Images in memory stay uint8 until a batch is made: 60,000 of them take 47 MB, and no Python runs per sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# About as many images of each part go into the fingerprint.
FINGERPRINT_IMAGES = 1000


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 [n, channels, height, width], `labels` int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.images.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory of images and labels, in bytes."""
        return self.images.nbytes + self.labels.nbytes

    def digest(self) -> bytes:
        """Return all labels and some images, with their shapes."""
        some = self.images[:: max(1, len(self) // FINGERPRINT_IMAGES)]
        parts = (self.labels, some)
        return b"".join(f"{part.shape}".encode() + part.cpu().contiguous().numpy().tobytes() for part in parts)

    def to(self, device: torch.device) -> Split:
        """Return the same split on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set for image classification.

    Attributes:
        name: Its name in messages and results.
        train: The training images.
        test: The test images. The best checkpoint is chosen on them.
        classes: Number of classes.
        mean: Mean of the training images' pixels, scaled to 0..1; of images in files that of ImageNet.
        std: Their standard deviation, likewise.
        flip_invariant: Whether an image and its mirror image are of the same class, so that training may flip images.
        class_names: The names of the classes, by their number; empty if they have none.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: float
    std: float
    flip_invariant: bool = False
    class_names: Sequence[str] = ()

    @classmethod
    def from_splits(cls, name: str, train: Split, test: Split, classes: int, flip_invariant: bool = False) -> Dataset:
        """Make a data set of two splits; mean and standard deviation are those of the training images."""
        counts = torch.bincount(train.images.flatten(), minlength=256).double()  # no copy of the images as floats
        levels = torch.arange(256).double() / 255
        fractions = counts / counts.sum()
        mean = (levels * fractions).sum()
        std = ((levels - mean) ** 2 * fractions).sum().sqrt()
        return cls(name, train, test, classes, mean.item(), std.item(), flip_invariant)

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.train.channels

    @property
    def nbytes(self) -> int:
        """Memory that all of it takes, or would take, in bytes."""
        return self.train.nbytes + self.test.nbytes

    @property
    def fingerprint(self) -> str:
        """A hash of all labels and of some images, or of the files; 16 hexadecimal digits."""
        digest = hashlib.sha256(f"{self.mean:.6f} {self.std:.6f}".encode())  # these come from every pixel
        for split in (self.train, self.test):
            digest.update(split.digest())
        return digest.hexdigest()[:16]

    def to(self, device: torch.device) -> Dataset:
        """Return the same data set, whose images are in memory, on another device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def normalize(self, images: Tensor) -> Tensor:
        """Return uint8 images [n, ...] as float ones of zero mean and unit variance, on the same device."""
        return images.float().sub_(255 * self.mean).div_(255 * self.std)
