"""The data sets by name: which one a config means, and how each is loaded."""

import os
from collections.abc import Callable

import torch

from ray_on_ecs.errors import UsageError, counted
from training.engine.feed import Feed, in_threads
from training.recipes.images import files
from training.recipes.images.config import FOLDER, MIN_STEPS_PER_EPOCH, ImageConfig
from training.recipes.images.dataset import Dataset, Split

IMAGE_SIZE = 28
# Images of a folder that would take more of a node's memory stay in their files.
MAX_MEMORY_FRACTION = 0.25
# Classes that a line names.
MOST_NAMED = 5


def resolve_dataset(config: ImageConfig) -> str:
    """Return the name of the data set to use, having checked that it is available.

    `auto` is Fashion-MNIST if its files are here or its mirror answers within seconds, otherwise the digits.

    Raises:
        UsageError: The data set is not available; the message names alternatives.
    """
    if config.dataset == FOLDER:
        _find_files(config)
        return config.dataset
    if config.dataset not in ("auto", "fashion-mnist"):
        _refuse_data_dir(config)
        return config.dataset
    from training.recipes.images import fashion_mnist  # imports torchvision, which takes seconds

    if config.data_dir is not None:
        fashion_mnist.load(config)  # find broken files now, rather than on every worker
    elif reason := fashion_mnist.download_error():
        if config.dataset == "auto":
            return "digits"
        raise UsageError(
            f"--dataset fashion-mnist: its download can't be reached ({reason}); {fashion_mnist.ALTERNATIVES}"
        )
    return "fashion-mnist"


def load(name: str, config: ImageConfig, feed: Feed = in_threads) -> Dataset:
    """Load the whole data set `name` into the CPU's memory, unless it is a folder's that is streamed.

    Args:
        name: One of `config.DATASETS`, without auto.
        config: The run's settings.
        feed: Prepares the images of a folder.

    Raises:
        UsageError: Its files are missing, broken or can't be downloaded.
    """
    return _folder(config, feed) if name == FOLDER else LOADERS[name](config)


def _refuse_data_dir(config: ImageConfig) -> None:
    if config.data_dir is not None:
        raise UsageError(
            f"--data-dir: {config.data_dir!r} is not used by --dataset {config.dataset}; leave one of them out"
        )


def _fashion_mnist(config: ImageConfig) -> Dataset:
    from training.recipes.images import fashion_mnist

    return fashion_mnist.load(config)


def _folder(config: ImageConfig, feed: Feed) -> Dataset:
    dataset = _find_files(config)
    if config.stream == "on" or (config.stream == "auto" and (config.random_crop == "on" or _is_large(dataset))):
        return dataset
    splits = dataset.train.load(feed), dataset.test.load(feed)
    return Dataset(
        dataset.name,
        *splits,
        dataset.classes,
        dataset.mean,
        dataset.std,
        dataset.flip_invariant,
        dataset.class_names,
    )


def describe_folder(config: ImageConfig) -> str:
    """Say in a line what is in the folder of the data, and whether it makes few steps."""
    found = _find_files(config)
    names = ", ".join([*found.class_names[:MOST_NAMED], *(["…"] if found.classes > MOST_NAMED else [])])
    line = (
        f"{config.data_dir}: {len(found.train):,} training and {len(found.test):,} test images of {found.classes} "
        f"classes ({names})"
    )
    images = config.local_batch_size * config.microbatches(1)
    steps, left_out = divmod(len(found.train), images)
    if not 0 < steps < MIN_STEPS_PER_EPOCH:
        return line
    return (
        f"{line}; an epoch has only {counted(steps, 'step')} of {images} images, and leaves {left_out} out: a smaller "
        "--batch-size makes more"
    )


def _find_files(config: ImageConfig) -> files.FileDataset:
    assert config.data_dir is not None
    return files.find(config.data_dir, config.image_size)


def _is_large(dataset: Dataset) -> bool:
    """Whether the workers of a node, each with all images in memory, would take too much of it."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return workers * dataset.nbytes > MAX_MEMORY_FRACTION * memory


def _digits(config: ImageConfig) -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits (UCI), 8x8 in 17 greys, scaled up to 28x28; a fifth is for tests."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float().unsqueeze(1) * (255 / 16)
    images = torch.nn.functional.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split for every seed
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    images = images.round().to(torch.uint8)
    return Dataset.from_splits(
        "digits", Split(images[train], labels[train]), Split(images[test], labels[test]), classes=10
    )


def _synthetic(config: ImageConfig) -> Dataset:
    """Make any number of images that a model can learn: noise around one random picture per class."""
    classes = 10
    generator = torch.Generator().manual_seed(config.seed)
    pictures = torch.randint(0, 256, (classes, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)

    def split(n: int) -> Split:
        labels = torch.arange(n) % classes
        noise = torch.randint(0, 256, (n, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)
        return Split(pictures[labels] // 2 + noise // 2, labels)

    return Dataset.from_splits("synthetic", split(config.samples), split(max(classes, config.samples // 6)), classes)


# The names in config.DATASETS, without auto and folder.
LOADERS: dict[str, Callable[[ImageConfig], Dataset]] = {
    "fashion-mnist": _fashion_mnist,
    "digits": _digits,
    "synthetic": _synthetic,
}
