"""Images in files, a folder for each class: read, decoded, cropped and scaled, in memory once or anew in each epoch.

    train/cat/1.jpg  train/dog/2.png  …  test/cat/3.jpg  …

The folder can be `s3://bucket/prefix`. `val/` is another name for `test/`. Without either, the classes' folders lie at
the top, and one image of ten is for testing, by a hash of its name. What begins with a dot is not read.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pyarrow import fs
from torch import Tensor

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import filesystem_of, find_files, short_reason
from training.engine.feed import Feed
from training.recipes.images.augment import Augmentation
from training.recipes.images.dataset import Dataset, Split

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
TRAIN, TESTS = "train", ("test", "val")
TEST_ONE_OF = 10
# What some programs leave among the images, beside names that begin with a dot.
LEFTOVERS = frozenset({"__MACOSX"})
# Classes that an error names.
MOST_NAMED = 5
CHANNELS = 3
# Requests to S3 that wait at once for the images of one batch.
READERS = 16
# Images that are decoded together when all are kept in memory.
PART = 256
# Mean and standard deviation of ImageNet's pixels, as torchvision has them, over its three channels:
# https://docs.pytorch.org/vision/stable/models.html
MEAN, STD = 0.449, 0.226
# A random crop has between these fractions of the image's area, and between these ratios of width to height, as
# torchvision's RandomResizedCrop.
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)

# Left, upper, right and lower edge, in pixels.
Box = tuple[float, float, float, float]


class File(NamedTuple):
    """An image's file: its path on the file system, the class that it shows, and its size in bytes."""

    path: str
    label: int
    size: int


@dataclass(frozen=True)
class FilePart:
    """Images that are decoded together, wherever that is done.

    Attributes:
        address: The data set's folder, which says on which file system the paths are.
        paths: The files.
        image_size: Height and width of the images that they become.
        crops: Four numbers of 0..1 for each, that say what is cut out, float [n, 4]; None takes the middle square.
        augmentation: The changes of these images, or None for none.
    """

    address: str
    paths: Sequence[str]
    image_size: int
    crops: Tensor | None = None
    augmentation: Augmentation | None = None


@dataclass(frozen=True)
class FileSplit(Split):
    """One part of a data set, of which no image is in memory: `images` is empty.

    Attributes:
        address: The data set's folder.
        files: The image files.
    """

    address: str
    files: Sequence[File]

    @classmethod
    def of(cls, address: str, files: Sequence[File], image_size: int) -> FileSplit:
        """Return the images of these files, scaled to a height and width."""
        none = torch.empty(0, CHANNELS, image_size, image_size, dtype=torch.uint8)
        return cls(none, torch.tensor([each.label for each in files]), address, files)

    @property
    def nbytes(self) -> int:
        """Memory that the images would take, in bytes."""
        return len(self) * math.prod(self.images.shape[1:])

    def digest(self) -> bytes:
        """Return the files' names, labels and sizes."""
        return repr([(each.path.rpartition("/")[2], each.label, each.size) for each in self.files]).encode()

    def part(self, indices: Tensor, crops: Tensor | None = None, augmentation: Augmentation | None = None) -> FilePart:
        """Return what to decode: these images, int64 [n], and their changes."""
        paths = [self.files[index].path for index in indices.tolist()]
        # A view would take the numbers of the whole epoch with it to another process.
        own = None if crops is None else crops.clone()
        return FilePart(self.address, paths, self.images.shape[-1], own, augmentation and augmentation.clone())

    def load(self, feed: Feed) -> DecodedSplit:
        """Decode all images into memory."""
        images = self.images.new_empty(len(self), *self.images.shape[1:])
        parts = (self.part(some) for some in torch.arange(len(self)).split(PART))
        for place, decoded in zip(images.split(PART), feed(parts, decode), strict=True):
            place.copy_(torch.from_numpy(decoded))
        return DecodedSplit(images, self.labels, self.digest())


@dataclass(frozen=True)
class DecodedSplit(Split):
    """One part of a data set whose images came from files into memory; a run may go on with them or with the files."""

    files_digest: bytes

    def digest(self) -> bytes:
        """Return the files' names, labels and sizes."""
        return self.files_digest


@dataclass(frozen=True)
class FileDataset(Dataset):
    """A data set of which no image is in memory."""

    train: FileSplit
    test: FileSplit


@lru_cache(1)  # a bucket takes a while to list, and the driver asks twice
def find(address: str, image_size: int) -> FileDataset:
    """Find the images of a folder or `s3://bucket/prefix`, each of which is scaled to so many pixels across and down.

    Raises:
        UsageError: It can't be read, or holds no folders of classes with images.
    """
    train, test, classes = _classes(address, _listed(address))
    splits = (FileSplit.of(address, each, image_size) for each in (train, test))
    return FileDataset(
        address, *splits, classes=len(classes), mean=MEAN, std=STD, flip_invariant=True, class_names=classes
    )


def draw_crops(n: int, generator: torch.Generator) -> Tensor:
    """Draw what is cut out of n images, float [n, 4]: area, ratio of the sides, and where it is across and down."""
    return torch.rand(n, 4, generator=generator)


def decode(part: FilePart) -> np.ndarray:
    """Read, decode, cut, scale and change images; returns them as uint8 [n, 3, height, width].

    Raises:
        UsageError: A file can't be read, or is no image.
    """
    images = np.empty((len(part.paths), CHANNELS, part.image_size, part.image_size), np.uint8)
    crops: Iterable[Any] = [None] * len(part.paths) if part.crops is None else part.crops.tolist()
    for index, (path, content, crop) in enumerate(zip(part.paths, _contents(part), crops, strict=True)):
        images[index] = _decode(path, content, part.image_size, crop)
    if part.augmentation is None:
        return images
    return part.augmentation.apply(torch.from_numpy(images)).numpy()


def _listed(address: str) -> dict[tuple[str, ...], fs.FileInfo]:
    """Return the image files, by their names and those of the folders below the address."""
    top, found = find_files(address, "--data-dir")
    images = [each for each in found if f".{each.extension.lower()}" in EXTENSIONS]
    names = {PurePosixPath(each.path).relative_to(top).parts: each for each in images}
    return {parts: each for parts, each in names.items() if not any(map(_is_left_over, parts))}


def _is_left_over(name: str) -> bool:
    return name.startswith(".") or name in LEFTOVERS


def _classes(address: str, files: dict[tuple[str, ...], fs.FileInfo]) -> tuple[list[File], list[File], list[str]]:
    """Return the files for training and for testing, and the names of the classes."""
    split = any(parts[0] == TRAIN for parts in files if len(parts) > 2)
    known = {each for parts in files if (each := _class_of(parts, split)) is not None}
    numbers = {name: number for number, name in enumerate(sorted(known))}
    train, test = [], []
    for parts, each in files.items():
        name = _class_of(parts, split)
        if name is None:
            continue
        is_test = parts[0] in TESTS if split else _is_test("/".join(parts))
        (test if is_test else train).append(File(each.path, numbers[name], each.size))
    if len(numbers) < 2 or not train or not test:
        loose = sum(_class_of(parts, split) is None for parts in files)
        raise UsageError(
            f"--data-dir: {address!r} has {len(train)} training and {len(test)} test images of {len(numbers)} classes, "
            f"and {loose} images that are in no class's folder; it must hold train/CLASS/… and test/CLASS/… or CLASS/… "
            f"with images ({', '.join(sorted(EXTENSIONS))}) of two classes or more"
        )
    trained = {each.label for each in train}
    if untrained := [name for name, number in numbers.items() if number not in trained]:
        way_out = "name the classes' folders alike in both parts" if split else "give it more images"
        raise UsageError(
            f"--data-dir: {address!r} has no training images of {', '.join(untrained[:MOST_NAMED])}, but test images; "
            f"{way_out}"
        )
    return train, test, list(numbers)


def _class_of(parts: Sequence[str], split: bool) -> str | None:
    """Return the class of a file at this place below the folder, or None if it belongs to none."""
    if split:
        return parts[1] if len(parts) > 2 and parts[0] in (TRAIN, *TESTS) else None
    return parts[0] if len(parts) > 1 and parts[0] not in (TRAIN, *TESTS) else None


def _is_test(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % TEST_ONE_OF == 0


def _contents(part: FilePart) -> Iterator[bytes]:
    """Yield the files' contents, in order; those of a bucket are fetched side by side."""
    filesystem = filesystem_of(part.address)

    def read(path: str) -> bytes:
        try:
            with filesystem.open_input_file(path) as file:
                return file.read()
        except OSError as cause:
            raise UsageError(f"--data-dir: {path} can't be read ({short_reason(cause)})") from cause

    if isinstance(filesystem, fs.LocalFileSystem):
        yield from map(read, part.paths)
        return
    with ThreadPoolExecutor(READERS, "read") as pool:
        yield from pool.map(read, part.paths)


def _decode(path: str, content: bytes, size: int, crop: Sequence[float] | None) -> np.ndarray:
    """Return an image as uint8 [3, size, size]: a part of it, scaled."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            left, upper, right, lower = _middle(width, height) if crop is None else _cut(width, height, crop)
            # A JPEG is decoded at half, a quarter or an eighth of its size, if that is enough.
            needed = (math.ceil(size * width / (right - left)), math.ceil(size * height / (lower - upper)))
            image.draft("RGB", needed)
            across, down = image.size[0] / width, image.size[1] / height
            box = (left * across, upper * down, right * across, lower * down)
            scaled = _eight_bits(image).convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as cause:
        raise UsageError(f"--data-dir: {path} is no image that can be decoded ({cause}); remove it") from cause
    return np.asarray(scaled).transpose(2, 0, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits as one of 8, as Pillow would clip it to white; others as they are."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))


def _middle(width: int, height: int) -> Box:
    """Return the largest square in the middle."""
    side = min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def _cut(width: int, height: int, crop: Sequence[float]) -> Box:
    """Return a random part: its area and the logarithm of its ratio are uniform, unless the image is too narrow."""
    area, ratio, across, down = crop
    area = (CROP_AREA[0] + area * (CROP_AREA[1] - CROP_AREA[0])) * width * height
    low, high = (math.log(each) for each in CROP_RATIO)
    ratio = math.exp(low + ratio * (high - low))
    # At least a pixel, and at most the image.
    cut_width = min(width, max(1.0, math.sqrt(area * ratio)))
    cut_height = min(height, max(1.0, math.sqrt(area / ratio)))
    left, upper = across * (width - cut_width), down * (height - cut_height)
    return left, upper, left + cut_width, upper + cut_height
