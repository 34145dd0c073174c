"""Data sets of images by name or folder: Fashion-MNIST, digits, and photographs in folders."""

from __future__ import annotations

import importlib.metadata
import urllib.request
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch.nn.functional import interpolate
from torchvision.datasets import FashionMNIST

from ray_on_ecs.checkpoint.index import CheckpointIndex
from ray_on_ecs.checkpoint.location import open_folder
from ray_on_ecs.recipes.cache import CACHE
from ray_on_ecs.recipes.image_batches import Images, ImagesInMemory
from ray_on_ecs.recipes.options import fail
from ray_on_ecs.recipes.photographs import ImageFolders
from ray_on_ecs.recipes.ranks import choice_of_rank_0
from ray_on_ecs.storage.filesystem import fetch

BUILT_IN = ("auto", "fashion-mnist", "digits")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIDE = 28  # of small images, in pixels


def load_images(source: str, size: int = 224) -> Images:
    """Load a data set: one of BUILT_IN, or a folder or s3://bucket/prefix; prints one line and exits if that fails.

    Args:
        source: A folder has torchvision's FashionMNIST/raw/, or train/CLASS/... and test/CLASS/...
        size: Side of a folder's photographs, in pixels.
    """
    if source == "auto":
        source = choice_of_rank_0(lambda: _saved_choice() or fashion_mnist_or_digits())
    try:
        if source == "digits":
            return digits()
        if source == "fashion-mnist":
            return fashion_mnist(CACHE, download=True)
        folder = fetch(source, "--data")
        if (folder / "FashionMNIST" / "raw").is_dir():
            return fashion_mnist(folder)
        return ImageFolders(folder, size)
    except Exception as cause:  # files may be broken in any way; a network may be better at the next attempt
        is_network = isinstance(cause, OSError | RuntimeError) and ("://" in source or source in BUILT_IN)
        fail(f"argument --data: {source!r} can't be read ({cause})", status=1 if is_network else 2)


def load_images_in_memory(source: str) -> ImagesInMemory:
    """Load a data set as `load_images` does, unless it is one of photographs."""
    data = load_images(source)
    if not isinstance(data, ImagesInMemory):
        fail(f"argument --data: {source!r} lacks FashionMNIST/raw/; image_classifier.py trains on photographs")
    return data


def fashion_mnist_or_digits() -> str:
    """Return fashion-mnist if it is here or can be downloaded, or else digits, which scikit-learn brings."""
    if all((CACHE / "FashionMNIST" / "raw" / name).is_file() for name in FILES):
        return "fashion-mnist"
    try:
        urllib.request.urlopen(FashionMNIST.mirrors[0] + FashionMNIST.resources[-1][0], timeout=5).close()  # nosec B310 # constant
    except OSError as cause:
        print(f"Fashion-MNIST can't be downloaded ({cause}): training on handwritten digits", flush=True)
        return "digits"
    return "fashion-mnist"


def fashion_mnist(root: Path, *, download: bool = False) -> ImagesInMemory:
    """Load Fashion-MNIST from torchvision's folder FashionMNIST/raw in a folder, which one process of a node fills."""
    if download:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "fashion-mnist.lock"):
            FashionMNIST(str(root), download=True)
    parts = [FashionMNIST(str(root), train=train) for train in (True, False)]
    train, test = ((part.data.unsqueeze(1), part.targets) for part in parts)
    return ImagesInMemory("fashion-mnist", FashionMNIST.classes, train, test)


def digits() -> ImagesInMemory:
    """Load scikit-learn's 1,797 handwritten digits, scaled up; a fifth is for the test."""
    # The file alone: a second of each worker's start would go into the import of scikit-learn.
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",", dtype=np.float32)
    pixels, targets = rows[:, :-1], rows[:, -1]
    small = torch.from_numpy(pixels * (255 / 16)).reshape(-1, 1, 8, 8)
    images = interpolate(small, size=(SIDE, SIDE), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(targets).long()
    test, train = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tensor_split([359])
    data = ImagesInMemory("digits", list("0123456789"), (images[train], labels[train]), (images[test], labels[test]))
    data.can_flip = False
    return data


def _saved_choice() -> str | None:
    """Return the built-in data set of the run's newest checkpoint: a run that is started again keeps its choice."""
    newest = CheckpointIndex(open_folder(None), 1, None, "max", print).newest
    saved = newest[1]["config"].get("data") if newest else None
    return saved if saved in BUILT_IN else None
