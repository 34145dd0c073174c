"""An image classifier in plain PyTorch: resnet18 on Fashion-MNIST, or any model on your own images.

    ray-on-ecs run image_classifier.py --epochs 5
    ray-on-ecs run image_classifier.py --data s3://my-bucket/flowers --model resnet50
    torchrun --nproc-per-node 2 image_classifier.py --data ./flowers

The images are kept in memory as uint8, and flipped and shifted on the device. Order and augmentation depend only on the
seed and the epoch, and a step always has the same micro-batches, so the number of workers does not change the learning
curve. The file is self-contained: copy it (ray-on-ecs recipe copy image_classifier) and change it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pkgutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
MIN_STEPS = 400  # of a training, unless --epochs says otherwise
MIN_STEPS_PER_EPOCH = 8  # or the default batch is smaller
SIDE = 28  # of small images, in pixels
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ray-on-ecs"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BUILT_IN = ("auto", "fashion-mnist", "digits")
DATA_HELP = (
    "fashion-mnist or digits; a folder or s3://bucket/prefix with FashionMNIST/raw/, or with train/CLASS/... and "
    "test/CLASS/...; auto (the default): fashion-mnist if it can be downloaded, or else digits"
)


def fail(line: str, status: int = 2) -> NoReturn:
    """Print one line and exit; status 2 is an error that a restart won't fix."""
    print(f"image_classifier.py: error: {line}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail  # ty: ignore[invalid-assignment]
    add = parser.add_argument
    add("--data", default="auto", metavar="NAME|FOLDER", help=DATA_HELP)
    add("--model", default="resnet18", help="one of torchvision's, or package.module:function of (channels, classes)")
    add("--epochs", type=int, help=f"by default at least 4, and as many as {MIN_STEPS} steps take")
    add("--batch-size", type=int, help="images of a micro-batch (512 on GPUs, 64 on CPUs, 128 of a folder)")
    add("--max-workers", type=int, help="micro-batches of a step, which the workers share (default: the workers)")
    add("--lr", type=float, default=3e-3, help="peak learning rate for 256 images a step; it grows by the root")
    add("--weight-decay", type=float, default=0.05, help="of all weights but biases and norms (%(default)s)")
    add("--image-size", type=int, default=224, help="side of a folder's images, in pixels (%(default)s)")
    add("--max-shift", type=int, choices=range(9), default=0, help="move training images by up to N pixels")
    add("--flip", action=argparse.BooleanOptionalAction, help="flip half of the training images (of digits: no)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs that have it")
    add("--compile", action="store_true", help="compile the model, which takes a minute")
    add("--samples", type=int, help="train on N of the images only")
    add("--seed", type=int, default=0, help="of weights, order and augmentation (%(default)s)")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "max_workers", "image_size", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            fail(f"argument --{name.replace('_', '-')}: {value} must be at least 1")
    if not (0 < args.lr < math.inf and 0 <= args.weight_decay < math.inf and 0 <= args.seed < 2**32):
        fail("argument --lr, --weight-decay, --seed: a positive number, one of at least 0, and one below 2**32")
    if args.data not in BUILT_IN and "://" not in args.data and not Path(args.data).expanduser().is_dir():
        fail(f"argument --data: {args.data!r} is neither a folder nor one of {', '.join(BUILT_IN)}, s3://bucket/prefix")
    return args


if __name__ == "__main__":
    options = parse()  # before torch is imported, which takes seconds

import torch
import torch.distributed as dist
import torchvision
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import FashionMNIST, ImageFolder
from torchvision.models import get_model, list_models
from torchvision.transforms.v2 import CenterCrop, Compose, PILToTensor, Resize

from ray_on_ecs import Checkpointer, DistributedSampler, progress
from ray_on_ecs.storage.filesystem import fetch


def resolve_defaults(args: argparse.Namespace, data: Data, device: torch.device) -> None:
    """Set the defaults that depend on data, device and workers, and check them."""
    total, is_gpu = len(data.train[1]), device.type == "cuda"
    args.max_workers = args.max_workers or int(os.environ.get("MAX_WORLD_SIZE", RANKS))
    if args.max_workers < RANKS:
        fail(f"argument --max-workers: {args.max_workers} is less than the {RANKS} workers")
    default_size = 512 if is_gpu else 64
    if data.train[0].shape[-1] > 2 * SIDE:  # large images
        default_size = 128
    args.batch_size = args.batch_size or max(2, min(default_size, total // (MIN_STEPS_PER_EPOCH * args.max_workers)))
    steps = total // (args.batch_size * args.max_workers)
    if not steps:
        fail(f"argument --batch-size: {args.batch_size} on each of {args.max_workers} workers is more than the {total} "
             f"training images; use {total // args.max_workers} or less, or fewer workers")  # fmt: skip
    args.epochs = args.epochs or max(4, math.ceil(MIN_STEPS / steps))
    args.flip = data.flip if args.flip is None else args.flip
    if args.precision == "auto":
        args.precision = "bf16" if is_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


@dataclass
class Data:
    """Images in memory: uint8 [n, channels, height, width] and int64 labels [n], for training and for the test."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: list[str]
    flip: bool = True  # a mirror image is of the same class


def load(args: argparse.Namespace) -> Data:
    """Load the data set that the options name."""
    if args.data == "auto":
        chosen = [fashion_mnist_or_digits() if RANK == 0 else ""]
        if RANKS > 1:
            dist.broadcast_object_list(chosen)
        args.data = chosen[0]
    if args.data == "digits":
        return digits()
    try:
        if args.data == "fashion-mnist":
            CACHE.mkdir(parents=True, exist_ok=True)
            with FileLock(CACHE / "fashion-mnist.lock"):  # one download for each node
                return fashion_mnist(CACHE, download=True)
        folder = fetch(args.data if "://" in args.data else str(Path(args.data).expanduser()), "--data")
        if (folder / "FashionMNIST" / "raw").is_dir():
            return fashion_mnist(folder, download=False)
        return class_folders(folder, args)
    except Exception as cause:  # files may be broken in any way; a network may be better at the next attempt
        is_network = isinstance(cause, OSError | RuntimeError) and ("://" in args.data or args.data in BUILT_IN)
        fail(f"argument --data: {args.data!r} can't be read ({cause})", status=1 if is_network else 2)


def fashion_mnist_or_digits() -> str:
    """Return Fashion-MNIST if it is here or can be downloaded, or else the digits that scikit-learn brings."""
    chosen = Path("auto-data.txt")  # a run that is started again keeps its choice
    if not chosen.is_file():
        chosen.write_text("fashion-mnist")
        if not all((CACHE / "FashionMNIST" / "raw" / name).is_file() for name in FILES):
            try:
                urllib.request.urlopen(FashionMNIST.mirrors[0] + FashionMNIST.resources[-1][0], timeout=5).close()  # nosec B310 # constant
            except OSError as cause:
                print(f"Fashion-MNIST can't be downloaded ({cause}): training on handwritten digits", flush=True)
                chosen.write_text("digits")
    return chosen.read_text()


def fashion_mnist(root: Path, *, download: bool) -> Data:
    """Load Fashion-MNIST from torchvision's folder FashionMNIST/raw in a folder."""
    parts = [FashionMNIST(str(root), train=train, download=download) for train in (True, False)]
    train, test = ((part.data.unsqueeze(1), part.targets) for part in parts)
    return Data("fashion-mnist", train, test, FashionMNIST.classes)


def digits() -> Data:
    """Load scikit-learn's 1,797 handwritten digits, scaled up; a fifth is for the test."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    small = torch.from_numpy(pixels * (255 / 16)).float().reshape(-1, 1, 8, 8)
    images = interpolate(small, size=(SIDE, SIDE), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(targets).long()
    test, train = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tensor_split([359])
    return Data("digits", (images[train], labels[train]), (images[test], labels[test]), list("0123456789"), flip=False)


def class_folders(folder: Path, args: argparse.Namespace) -> Data:
    """Read train/CLASS/... and test/CLASS/... of a folder into memory, scaled and cut to squares."""
    if not all((folder / name).is_dir() for name in ("train", "test")):
        raise ValueError("it has neither FashionMNIST/raw/ nor train/CLASS/... and test/CLASS/...")
    prepare = Compose([PILToTensor(), Resize(args.image_size, antialias=True), CenterCrop(args.image_size)])
    train, test = (ImageFolder(str(folder / name), prepare) for name in ("train", "test"))
    if train.classes != test.classes:
        raise ValueError(f"train has the classes {', '.join(train.classes)}, and test {', '.join(test.classes)}")
    needed = (len(train) + len(test)) * 3 * args.image_size**2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise ValueError(f"{needed / 2**30:.0f} GiB is over half of the node's memory; use a smaller --image-size")

    def read(part: ImageFolder) -> tuple[Any, Any]:
        with ThreadPoolExecutor() as threads:
            return torch.stack(list(threads.map(lambda n: part[n][0], range(len(part))))), torch.tensor(part.targets)

    return Data(Path(args.data).name, read(train), read(test), train.classes)


class Batches:
    """The micro-batches of each step, the same for any number of ranks; rank r takes every n-th of a step."""

    def __init__(self, data: Data, args: argparse.Namespace, device: torch.device) -> None:
        self.data, self.args, self.device = data, args, device
        self.mine = range(RANK, args.max_workers, RANKS)
        self.images = args.batch_size * args.max_workers  # of a step
        self.steps = len(data.train[1]) // self.images  # of an epoch, which leaves the last images out
        pixels = data.train[0][:: max(1, len(data.train[0]) // 1000)].float()
        self.mean, self.std = pixels.mean().item(), pixels.std().item()

    def train(self, sampler: DistributedSampler) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield this rank's augmented micro-batches of each step that is left of the epoch."""
        images, labels = self.data.train
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + sampler.epoch)
        flips = torch.rand(len(labels), generator=generator) < (0.5 if self.args.flip else 0.0)
        shift = self.args.max_shift
        shifts = torch.randint(-shift, shift + 1, (len(labels), 2), generator=generator)
        order = torch.tensor(sampler.order())
        for first in range(sampler.position, self.steps * self.images, self.images):
            step = []
            for number in self.mine:
                start = first + number * self.args.batch_size
                part = slice(start, start + self.args.batch_size)
                which = order[part].to(images.device)
                batch = images[which].to(self.device)
                batch = torch.where(flips[part].to(self.device)[:, None, None, None], batch.flip(-1), batch)
                windows = pad(batch, [shift] * 4).unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
                rows, columns = (shift - shifts[part].to(self.device)).unbind(1)  # new pixels are 0
                batch = windows[torch.arange(len(batch), device=self.device), :, rows, columns]
                step.append((self.normalize(batch), labels[which].to(self.device)))
            yield step

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, each once."""
        images, labels = (part[RANK::RANKS] for part in self.data.test)
        for start in range(0, len(labels), self.args.batch_size):
            part = slice(start, start + self.args.batch_size)
            yield self.normalize(images[part].to(self.device)), labels[part].to(self.device)

    def normalize(self, images: Tensor) -> Tensor:
        """Return images of zero mean and unit variance."""
        return (images.float() - self.mean) / self.std


def build_model(name: str, channels: int, classes: int) -> nn.Module:
    """Build a model of torchvision, or by a function of the user's own."""
    try:
        if ":" in name:
            sys.path.insert(0, os.getcwd())
            model = pkgutil.resolve_name(name)(channels, classes)
        elif name in list_models(module=torchvision.models):
            model = get_model(name, weights=None, num_classes=classes)
        else:
            fail(f"argument --model: {name!r} is neither a model of torchvision nor package.module:function")
    except Exception as cause:  # the user's module may fail in any way
        fail(f"argument --model: {name!r} can't be built ({type(cause).__name__}: {cause})")
    if not isinstance(model, nn.Module):
        fail(f"argument --model: {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    first = convolutions[0] if convolutions else None
    if ":" not in name and first is not None and first.in_channels != channels:  # torchvision's models take RGB
        first.in_channels = channels
        first.weight = nn.Parameter(first.weight.new_empty(first.out_channels, channels, *first.kernel_size))
        first.reset_parameters()
    return model


def check_model(name: str, network: nn.Module, shape: tuple[int, ...], classes: int, device: torch.device) -> None:
    """Fail unless a model in training mode returns logits [2, classes] for two images."""
    try:
        logits = copy.deepcopy(network)(torch.zeros(2, *shape, device=device))
    except Exception as cause:  # the user's module may fail in any way
        fail(f"argument --model: {name!r} can't take images of {'x'.join(map(str, shape))} ({cause})")
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        fail(f"argument --model: {name!r} doesn't return one logit for each of {classes} classes, but "
             f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}")  # fmt: skip


def move_once_per_step(norms: dict[_BatchNorm, float], number: int, total: int) -> None:
    """Set the momentum for the next micro-batch, so that a step moves running statistics once, by the mean of all."""
    for norm, momentum in norms.items():
        norm.momentum = momentum / (total - (total - number) * momentum)


def average_statistics(norms: dict[_BatchNorm, float], weight: float) -> None:
    """Average the running statistics over the ranks, weighted by each rank's fraction of the micro-batches."""
    for norm in norms:
        for statistics in (norm.running_mean, norm.running_var):
            if RANKS > 1 and statistics is not None:
                dist.all_reduce(statistics.mul_(weight))


class Sums:
    """Sums over an epoch of losses, correct predictions and images; a checkpoint has those of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, device=device, dtype=torch.float64)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch and its mean loss; nothing waits for the device."""
        self.sums[0] += loss * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks."""
        sums = self.sums.clone()
        if RANKS > 1:
            dist.all_reduce(sums)
        return {"sums": sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from sums, also on another number of ranks."""
        self.sums.copy_(self.sums.new_tensor(state["sums"]) / RANKS)

    def means(self, name: str) -> dict[str, float]:
        """Return loss and accuracy over all ranks, and reset the sums."""
        loss, correct, images = self.state_dict()["sums"]
        self.sums.zero_()
        return {f"{name}_loss": loss / images, f"{name}_accuracy": correct / images}


def main(args: argparse.Namespace) -> None:
    """Train, test after each epoch, and export the last and the best weights."""
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if RANKS > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    data = load(args)
    if args.samples:
        chosen = torch.randperm(len(data.train[1]), generator=torch.Generator().manual_seed(0))[: args.samples]
        data.train = data.train[0][chosen], data.train[1][chosen]
    resolve_defaults(args, data, device)
    batches = Batches(data, args, device)
    if device.type == "cuda" and data.train[0].nbytes < torch.cuda.mem_get_info()[0] // 2:
        data.train = data.train[0].to(device), data.train[1].to(device)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    network = build_model(args.model, data.train[0].shape[1], len(data.classes)).to(device)
    check_model(args.model, network, data.train[0].shape[1:], len(data.classes), device)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)
    torch.manual_seed(args.seed * 1_000_003 + RANK)  # dropout differs
    norms = {norm: norm.momentum for norm in network.modules() if isinstance(norm, _BatchNorm) and norm.momentum}
    model: Any = network
    if RANKS > 1:
        model = DistributedDataParallel(network, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if args.compile:
        model.compile()
    matrices = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() <= 1]  # biases and norms, not decayed
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    peak = args.lr * math.sqrt(batches.images / 256)  # https://arxiv.org/abs/2205.10287
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=args.epochs * batches.steps, pct_start=0.15, cycle_momentum=False
    )
    trained, sampler = Sums(device), DistributedSampler(data.train[1], seed=args.seed)
    settings = {name: value for name, value in vars(args).items() if name not in ("compile", "precision")}
    checkpoint = Checkpointer(
        model=model,
        optimizer=optimizer,
        state={"schedule": schedule, "sampler": sampler, "trained": trained},
        keep_best="test_accuracy",
        best_mode="max",
        config={**settings, "data": data.name, "images": len(data.train[1])},
    )
    checkpoint.resume()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
    if RANK == 0:
        steps = f"{args.epochs} x {batches.steps} steps of {batches.images} images"
        done = f", {checkpoint.epoch} epochs done" if checkpoint.epoch else ""
        print(f"{args.model} on {data.name}: {steps}, {RANKS} x {device.type.upper()}{done}", flush=True)

    while checkpoint.epoch < args.epochs and not checkpoint.should_stop:
        began, first = time.perf_counter(), checkpoint.step
        model.train()
        for step in batches.train(sampler):
            for number, (images, labels) in enumerate(step, start=1):
                move_once_per_step(norms, number, len(step))
                with model.no_sync() if RANKS > 1 and number < len(step) else nullcontext():
                    with autocast:
                        logits = model(images).float()
                        loss = cross_entropy(logits, labels)
                    (loss * (RANKS / args.max_workers)).backward()  # DDP takes the mean over the ranks
                trained.add(loss.detach(), logits, labels)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if checkpoint.after_step(samples=batches.images, loss=loss):
                break
            progress(checkpoint.step, args.epochs * batches.steps)
        else:
            average_statistics(norms, len(batches.mine) / args.max_workers)
            speed = (checkpoint.step - first) * batches.images / (time.perf_counter() - began)
            tested = Sums(device)
            network.eval()
            with torch.no_grad(), autocast:
                for images, labels in batches.test():
                    logits = network(images).float()
                    tested.add(cross_entropy(logits, labels), logits, labels)
            metrics = {**trained.means("train"), **tested.means("test"), "samples_per_second": speed}
            metrics["seconds"] = time.perf_counter() - began
            if RANK == 0:
                line = "  ".join(f"{name.replace('_', ' ')} {value:<6.4g}" for name, value in metrics.items())
                print(f"epoch {checkpoint.epoch + 1}/{args.epochs}  {line}", flush=True)
            if not math.isfinite(metrics["train_loss"] + metrics["test_loss"]):
                fail(f"the loss of epoch {checkpoint.epoch + 1} is not finite; lower --lr, now {args.lr}")
            checkpoint.end_epoch(**metrics)
    if not checkpoint.should_stop:
        description = {
            "model": args.model,
            "classes": data.classes,
            "mean": batches.mean,
            "std": batches.std,
            "shape": data.train[0].shape[1:],
        }
        metadata = {"image_classifier": json.dumps(description)}
        checkpoint.export("model.safetensors", metadata)
        if checkpoint.load_best():
            checkpoint.export("best.safetensors", metadata)
    checkpoint.close()
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(options)
