"""An image classifier in plain PyTorch: resnet18 on Fashion-MNIST, or any model on your own images.

    torchrun --nproc-per-node 2 image_classifier.py --epochs 5
    ray-on-ecs run image_classifier.py --data s3://my-bucket/flowers --model resnet50

The images lie in memory as uint8. Shuffle and augmentation depend on seed and epoch alone, and a step always has the
same micro-batches, so the learning curve does not depend on the number of workers. The file stands alone: copy it and
change it.
"""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LEAST_STEPS = 400  # of a training, unless --epochs says otherwise
SIDE = 28  # of small images, in pixels
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ray-on-ecs"
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DATA_HELP = (
    "fashion-mnist, digits or synthetic; a folder or s3://bucket/prefix with Fashion-MNIST's four files, or with "
    "train/CLASS/... and test/CLASS/...; auto (the default): fashion-mnist if it can be had, or else digits"
)
BUILT_IN = ("auto", "fashion-mnist", "digits", "synthetic")


# Options, checked before torch is imported, which takes seconds.


def fail(line: str) -> NoReturn:
    """End with status 2; rank 0 says why."""
    if os.environ.get("RANK", "0") == "0":
        print(f"image_classifier: error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def positive(text: str) -> int:
    """Convert an option's value to a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def fraction(text: str) -> float:
    """Convert an option's value to a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail  # type: ignore[method-assign]
    add = parser.add_argument
    add("--data", default="auto", metavar="NAME|FOLDER", help=DATA_HELP)
    add("--model", default="resnet18", help="one of torchvision's, or package.module:function of (channels, classes)")
    add("--epochs", type=positive, help=f"by default at least 4, and {LEAST_STEPS} steps")
    add("--batch-size", type=positive, help="images of a micro-batch (512 on GPUs, 64 on CPUs, 128 of a folder)")
    add("--max-workers", type=positive, help="micro-batches of a step, which the workers share (all workers of the run)")
    add("--lr", type=fraction, default=1e-3, help="peak learning rate for 256 images a step; it grows with the root")
    add("--weight-decay", type=float, default=0.05, help="of all weights but biases and norms (%(default)s)")
    add("--image-size", type=positive, default=224, help="side of a folder's images, in pixels (%(default)s)")
    add("--max-shift", type=int, default=0, help="move training images by up to so many pixels (%(default)s)")
    add("--flip", action=argparse.BooleanOptionalAction, help="flip half of the training images (of digits: no)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs that have it")
    add("--compile", action="store_true", help="compile the model, which takes a minute")
    add("--samples", type=positive, default=2048, help="training images of the synthetic data (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, shuffle and augmentation (%(default)s)")
    args = parser.parse_args()
    if args.data not in BUILT_IN and "://" not in args.data and not Path(args.data).expanduser().is_dir():
        fail(f"argument --data: {args.data!r} is neither a folder nor one of {', '.join(BUILT_IN)}, s3://bucket/prefix")
    if args.max_shift < 0 or args.weight_decay < 0:
        fail("argument --max-shift, --weight-decay: they must not be negative")
    return args


# Data.


@dataclass
class Data:
    """Images in memory: uint8 [n, channels, height, width] and labels [n], for training and for the test."""

    name: str
    train: tuple[Any, Any]
    test: tuple[Any, Any]
    classes: int
    flip: bool = True


def load(args: argparse.Namespace) -> Data:
    """Load the data set that the options name."""
    if args.data == "digits":
        return digits()
    if args.data == "synthetic":
        return synthetic(args.samples)
    if args.data in BUILT_IN:
        return fashion_mnist(args.data)
    from ray_on_ecs.errors import UsageError
    from ray_on_ecs.filesystem import fetch

    try:
        folder = fetch(str(Path(args.data).expanduser()) if "://" not in args.data else args.data, "--data")
    except (OSError, ValueError, UsageError) as cause:
        fail(f"argument --data: {args.data!r} can't be read ({cause})")
    for place in (folder, folder / "FashionMNIST" / "raw"):
        if all((place / name).is_file() or (place / f"{name}.gz").is_file() for name in IDX):
            return idx_files(place)
    return class_folders(folder, args)


def fashion_mnist(wanted: str) -> Data:
    """Download Fashion-MNIST once for each node; `auto` falls back to the digits."""
    from filelock import FileLock
    from torchvision.datasets import FashionMNIST

    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(CACHE / "fashion-mnist.lock"):
            FashionMNIST(str(CACHE), download=True)
    except (OSError, RuntimeError) as cause:
        if wanted != "auto":
            fail(f"argument --data: fashion-mnist can't be downloaded ({cause}); give a folder with its four files")
        print("Fashion-MNIST can't be downloaded here: training on scikit-learn's handwritten digits", flush=True)
        return digits()
    return idx_files(CACHE / "FashionMNIST" / "raw")


def idx_files(folder: Path) -> Data:
    """Read the four files of Fashion-MNIST, gzipped or not."""
    import gzip

    from torchvision.datasets.mnist import read_image_file, read_label_file

    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in IDX:
            file = folder / name
            if not file.is_file():
                file = Path(scratch, name)
                file.write_bytes(gzip.decompress((folder / f"{name}.gz").read_bytes()))
            parts.append(read_image_file(str(file)) if "images" in name else read_label_file(str(file)))
    images, labels, test_images, test_labels = parts
    return Data("fashion-mnist", (images.unsqueeze(1), labels), (test_images.unsqueeze(1), test_labels), 10)


def digits() -> Data:
    """Load scikit-learn's 1,797 handwritten digits, scaled up; a fifth is for the test."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import interpolate

    pixels, targets = load_digits(return_X_y=True)
    small = torch.from_numpy(pixels * (255 / 16)).float().reshape(-1, 1, 8, 8)
    images = interpolate(small, size=(SIDE, SIDE), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(targets).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([len(labels) // 5])
    return Data("digits", (images[train], labels[train]), (images[test], labels[test]), 10, flip=False)


def synthetic(samples: int) -> Data:
    """Make images that a model can learn: noise on one picture for each class."""
    import torch

    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 128, (10, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    parts = []
    for number in (samples, max(10, samples // 6)):
        labels = torch.arange(number) % 10
        noise = torch.randint(0, 128, (number, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        parts.append((pictures[labels] + noise, labels))
    return Data("synthetic", parts[0], parts[1], 10)


def class_folders(folder: Path, args: argparse.Namespace) -> Data:
    """Read train/CLASS/... and test/CLASS/... of a folder, scaled and cut to squares."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2 import CenterCrop, Compose, PILToTensor, Resize

    prepare = Compose([PILToTensor(), Resize(args.image_size, antialias=True), CenterCrop(args.image_size)])
    parts, names = [], []
    for name in ("train", "test"):
        try:
            found = ImageFolder(str(folder / name), prepare)
        except FileNotFoundError as cause:
            fail(f"argument --data: {args.data!r} has no images as {name}/CLASS/... ({cause})")
        with ThreadPoolExecutor() as threads:
            images = list(threads.map(lambda number, found=found: found[number][0], range(len(found))))
        parts.append((torch.stack(images), torch.tensor(found.targets)))
        names.append(found.classes)
    if names[0] != names[1]:
        fail(f"argument --data: train has the classes {', '.join(names[0])}, and test {', '.join(names[1])}")
    return Data(args.data, parts[0], parts[1], len(names[0]))


# Model.


def build_model(name: str, channels: int, classes: int) -> Any:
    """Build a model of torchvision, or by a function of the user's own."""
    from torch import nn

    if ":" in name:
        sys.path.insert(0, os.getcwd())
        try:
            model = pkgutil.resolve_name(name)(channels, classes)
        except Exception as cause:  # the user's module may fail in any way
            fail(f"argument --model: {name!r} can't be built ({type(cause).__name__}: {cause})")
        if not isinstance(model, nn.Module):
            fail(f"argument --model: {name!r} returned {type(model).__name__}, not a torch.nn.Module")
        return model
    from torchvision.models import get_model, list_models

    if name not in list_models():
        fail(f"argument --model: {name!r} is neither a model of torchvision nor package.module:function")
    model = get_model(name, num_classes=classes)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):  # the first one sees the images
            if module.in_channels != channels:
                parent, _, last = path.rpartition(".")
                options = {key: getattr(module, key) for key in ("kernel_size", "stride", "padding")}
                new = nn.Conv2d(channels, module.out_channels, bias=module.bias is not None, **options)
                setattr(model.get_submodule(parent), last, new)
            break
    return model


class Order:
    """The micro-batches of an epoch, the same for any number of ranks, of which rank r takes every n-th of a step."""

    def __init__(self, data: Data, args: argparse.Namespace, rank: int, ranks: int, device: Any) -> None:
        self.data, self.args, self.device = data, args, device
        self.mine = range(rank, args.max_workers, ranks)
        self.images = args.batch_size * args.max_workers  # of a step
        self.steps = len(data.train[1]) // self.images
        pixels = data.train[0][:: max(1, len(data.train[0]) // 1000)].float()
        self.mean, self.std = pixels.mean().item(), pixels.std().item()

    def train(self, sampler: Any) -> Iterator[list[tuple[Any, Any]]]:
        """Yield this rank's augmented micro-batches of each step that is left of the epoch."""
        import torch

        images, labels = self.data.train
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + sampler.epoch)
        shift, total = self.args.max_shift, len(labels)
        flips = torch.rand(total, generator=generator) < (0.5 if self.args.flip else 0.0)
        shifts = torch.randint(-shift, shift + 1, (total, 2), generator=generator)
        order = torch.tensor(sampler.order())
        for first in range(sampler.position, self.steps * self.images, self.images):
            step = []
            for number in self.mine:
                start = first + number * self.args.batch_size
                part = order[start : start + self.args.batch_size].to(images.device)
                flip, move = (each[start : start + len(part)].to(self.device) for each in (flips, shifts))
                batch = images[part].to(self.device)
                batch = torch.where(flip[:, None, None, None], batch.flip(-1), batch)
                step.append((self.normalize(moved(batch, move, shift)), labels[part].to(self.device)))
            yield step

    def test(self, rank: int, ranks: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of the test images, each once."""
        images, labels = (part[rank::ranks] for part in self.data.test)
        for batch, of in zip(images.split(1024), labels.split(1024), strict=True):
            yield self.normalize(batch.to(self.device)), of.to(self.device)

    def normalize(self, images: Any) -> Any:
        """Return images of zero mean and unit variance."""
        return (images.float() - self.mean) / self.std


def moved(images: Any, shifts: Any, most: int) -> Any:
    """Move each image down and right by its shift, int [n, 2] in [-most, most]; new pixels are 0."""
    import torch
    from torch.nn.functional import pad

    if not most:
        return images
    windows = pad(images, [most] * 4).unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images), device=images.device), :, most - shifts[:, 0], most - shifts[:, 1]]


# Training.


def main() -> None:
    """Train, test after each epoch, and export the last and the best weights."""
    args = parse()

    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from ray_on_ecs import Checkpointer, DistributedSampler

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    data = load(args)
    settle(args, data, ranks, device)
    order = Order(data, args, rank, ranks, device)
    data.train = tuple(part.to(device) for part in data.train)
    torch.manual_seed(args.seed)
    network = build_model(args.model, data.train[0].shape[1], data.classes).to(device)
    torch.manual_seed(args.seed * 1_000_003 + rank)  # dropout differs between the ranks
    model = network
    if ranks > 1:
        model = DistributedDataParallel(network, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if args.compile:
        model = torch.compile(model)
    decayed, others = ([p for p in network.parameters() if (p.dim() > 1) is flag] for flag in (True, False))
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    peak = args.lr * math.sqrt(order.images / 256)  # https://arxiv.org/abs/2205.10287
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=args.epochs * order.steps, pct_start=0.15, cycle_momentum=False
    )
    trained = Sums(device)
    sampler = DistributedSampler(data.train[1], seed=args.seed)
    checkpoint = Checkpointer(
        model=model,
        optimizer=optimizer,
        state={"schedule": schedule, "sampler": sampler, "trained": trained},
        keep_best="test_accuracy",
        best_mode="max",
        config={**vars(args), "data": data.name, "samples": len(data.train[1])},
    )
    checkpoint.resume()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
    if rank == 0:
        print(
            f"{args.model} on {data.name}: {args.epochs} epochs of {order.steps} steps of {order.images} images, on "
            f"{ranks} {device.type.upper()} workers",
            flush=True,
        )

    while checkpoint.epoch < args.epochs and not checkpoint.should_stop:
        began, images_before = time.perf_counter(), trained.sums[2].item()
        model.train()
        for step in order.train(sampler):
            for number, (images, labels) in enumerate(once_per_step(network, step), start=1):
                wait = model.no_sync() if ranks > 1 and number < len(step) else nullcontext()
                with wait:
                    with autocast:
                        logits = model(images).float()
                    loss = cross_entropy(logits, labels)
                    (loss * (ranks / args.max_workers)).backward()  # DDP takes the mean over the ranks
                trained.add(loss.detach() * len(labels), logits, labels)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if checkpoint.after_step(samples=order.images, loss=loss):
                break
        else:
            average_statistics(network, len(order.mine) / args.max_workers)
            images_trained = (trained.sums[2].item() - images_before) * ranks
            tested = Sums(device)
            model.eval()
            with torch.no_grad(), autocast:
                for images, labels in order.test(rank, ranks):
                    logits = network(images).float()
                    tested.add(cross_entropy(logits, labels, reduction="sum"), logits, labels)
            metrics = {**trained.means("train"), **tested.means("test")}
            metrics["images_per_second"] = images_trained / (time.perf_counter() - began)
            if rank == 0:
                print(f"epoch {checkpoint.epoch}: " + ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()), flush=True)
            if not math.isfinite(metrics["train_loss"] + metrics["test_loss"]):
                raise ArithmeticError(f"the loss of epoch {checkpoint.epoch} is not finite; lower --lr, now {args.lr}")
            checkpoint.end_epoch(**metrics)
    if not checkpoint.should_stop:
        checkpoint.export("model.safetensors")
        if checkpoint.load_best():
            checkpoint.export("best.safetensors")
    checkpoint.close()
    if ranks > 1:
        dist.destroy_process_group()


class Sums:
    """Sums of this rank over an epoch: loss, right answers and images. A checkpoint has them, too."""

    def __init__(self, device: Any) -> None:
        import torch

        self.sums = torch.zeros(3, device=device, dtype=torch.float64)

    def add(self, loss: Any, logits: Any, labels: Any) -> None:
        """Add a batch's sum of losses; nothing waits for the device."""
        self.sums[0] += loss
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def means(self, name: str) -> dict[str, float]:
        """Return loss and accuracy over all ranks, and begin again."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.all_reduce(self.sums)
        loss, right, images = self.sums.tolist()
        self.sums.zero_()
        return {f"{name}_loss": loss / images, f"{name}_accuracy": right / images}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"sums": self.sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from sums."""
        self.sums.copy_(self.sums.new_tensor(state["sums"]))


def settle(args: argparse.Namespace, data: Data, ranks: int, device: Any) -> None:
    """Replace the options that depend on data, device and workers by their values, and check them."""
    import torch

    total, is_gpu = len(data.train[1]), device.type == "cuda"
    args.max_workers = args.max_workers or int(os.environ.get("MAX_WORLD_SIZE", ranks))
    if args.max_workers < ranks:
        fail(f"argument --max-workers: {args.max_workers} is less than the {ranks} workers")
    wanted = 128 if data.train[0].shape[-1] > 64 else 512 if is_gpu else 64
    args.batch_size = args.batch_size or max(1, min(wanted, total // (8 * args.max_workers)))
    if args.batch_size * args.max_workers > total:
        fail(f"argument --batch-size: {args.batch_size} on each of {args.max_workers} workers is more than the {total} "
             f"training images; use {total // args.max_workers} or less, or fewer workers")  # fmt: skip
    steps = total // (args.batch_size * args.max_workers)
    args.epochs = args.epochs or max(4, math.ceil(LEAST_STEPS / steps))
    args.flip = data.flip if args.flip is None else args.flip
    if args.precision == "auto":
        args.precision = "bf16" if is_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def once_per_step(network: Any, step: list[Any]) -> Iterator[Any]:
    """Yield micro-batches, after which running statistics have moved once, by their mean over the micro-batches."""
    import torch

    buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in buffers]
    means = [torch.zeros_like(buffer) for buffer in buffers]
    for batch in step:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        yield batch
        for mean, buffer in zip(means, buffers, strict=True):
            mean.add_(buffer, alpha=1 / len(step))
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean)


def average_statistics(network: Any, weight: float) -> None:
    """Give all ranks the mean of their running statistics, by the micro-batches that each has had."""
    import torch.distributed as dist

    if dist.is_initialized():
        for buffer in network.buffers():
            if buffer.is_floating_point():
                buffer.mul_(weight)
                dist.all_reduce(buffer)


if __name__ == "__main__":
    main()
