"""The settings of an image classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from ray_on_ecs.config import AUTO_ON_OFF, ON_OFF, flag, setting
from ray_on_ecs.errors import UsageError
from training.engine.config import GPU_BATCH_SIZE, TrainingConfig, how, how_fast
from training.recipes import RECIPES

FOLDER = "folder"
DATASETS = ("auto", "fashion-mnist", "digits", "synthetic", FOLDER)
TRAIN_SAMPLES = {"fashion-mnist": 60_000, "digits": 1_438}
MIN_STEPS_PER_EPOCH = 8
FOLDER_IMAGE_SIZE = 224
# On a GPU, of images of that size: a resnet18 in bf16 keeps 11 MB for each until its gradients are computed.
FOLDER_BATCH_SIZE = 128

_what = partial(setting, group="what to train")


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainingConfig):
    """All settings of `python -m training`."""

    ABOUT = "Train an image classifier with PyTorch DDP on a Ray cluster, or on this machine."
    EXAMPLES = """\
        examples:
          python -m training --dataset digits --epochs 3
          python -m training --data-dir ~/data/fashion-mnist --batch-size 128 --num-workers 4
          python -m training --storage-path s3://my-bucket/runs --run-name baseline

        """

    recipe: str = _what("images", "images: an image classifier; language: a language model", choices=RECIPES)
    model: str = _what("resnet18", "resnet18, or package.module:function of your own (see the README)")
    dataset: str = _what(
        "fashion-mnist",
        "auto: fashion-mnist if it is here or can be downloaded, else digits; folder: images in --data-dir",
        choices=DATASETS,
    )
    data_dir: str | None = _what(
        None,
        "folder or s3://bucket/prefix with Fashion-MNIST's four IDX files, gzipped or not, instead of a download; or, "
        "with --dataset folder, with train/CLASS/… and test/CLASS/… of images",
        metavar="DIR",
        may_change=True,
    )
    image_size: int = _what(
        FOLDER_IMAGE_SIZE,
        "height and width, in pixels, to which the images of a folder are scaled",
        type=int,
        at_least=8,
        at_most=2048,
    )
    samples: int = _what(60_000, "training images in the synthetic data set", type=int, at_least=10)
    label_smoothing: float = how(
        0.0, "fraction of each label that is spread over all classes", type=float, at_least=0.0, at_most=1.0
    )
    horizontal_flip: str = how(
        "on", "flip half of the training images, if the data set is flip-invariant", choices=ON_OFF
    )
    random_crop: str = how(
        "off", "show, in each epoch, another part of each training image of a folder, scaled", choices=ON_OFF
    )
    max_shift: int = how(
        0, "translate training images by up to this many pixels in each direction", type=int, at_least=0, at_most=16
    )
    channels_last: str = how_fast("auto", "memory layout of images and weights; auto: on GPUs", choices=AUTO_ON_OFF)
    stream: str = how_fast(
        "auto",
        "read and decode the images of a folder in each epoch, ahead of the training, and keep none in memory; "
        "auto: if they would take more than a quarter of the node's, or are cropped at random",
        choices=AUTO_ON_OFF,
        may_change=True,
    )
    data_on_device: str = how_fast(
        "auto",
        "keep the data set on the GPU; auto: if it takes half of the free memory or less",
        choices=AUTO_ON_OFF,
        may_change=True,
    )

    def __post_init__(self) -> None:
        """Check the values, and those that belong to one data set against it."""
        super().__post_init__()
        _check_folder(self)

    @property
    def label(self) -> str:
        """The model and the data set."""
        return f"{self.model}-{self.dataset}"

    @property
    def default_batch_size(self) -> int:
        """The device's default; on GPUs less for a small data set, so that an epoch has `MIN_STEPS_PER_EPOCH`.

        For the images of a folder it is as much as a GPU has memory for, a power of two.
        """
        size = super().default_batch_size
        if self.device != "cuda":
            return size
        if self.dataset == FOLDER:
            fitting = FOLDER_BATCH_SIZE * (FOLDER_IMAGE_SIZE / self.image_size) ** 2
            return min(GPU_BATCH_SIZE, 2 ** max(0, math.floor(math.log2(fitting))))
        samples = TRAIN_SAMPLES.get(self.dataset, self.samples)
        return max(1, min(size, samples // (self.microbatches(1) * MIN_STEPS_PER_EPOCH)))


def _check_folder(config: ImageConfig) -> None:
    if config.dataset == FOLDER:
        if config.data_dir is None:
            raise UsageError("--dataset: 'folder' needs --data-dir, a folder or s3://bucket/prefix with the images")
        if config.random_crop == "on" and config.stream == "off":
            raise UsageError(
                "--stream: 'off' is not allowed with --random-crop on, because images in memory are cut once; leave "
                "one of them out"
            )
        return
    for name in ("random_crop", "stream"):
        if getattr(config, name) == "on":
            raise UsageError(
                f"{flag(name)}: 'on' is for --dataset folder; {config.dataset} stays in memory; leave it out"
            )
    if config.image_size != FOLDER_IMAGE_SIZE:
        raise UsageError(f"--image-size: {config.image_size} is for --dataset folder; leave it out")
