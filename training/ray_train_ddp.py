"""Distributed training with Ray Train: resnet18 on Fashion-MNIST, with DDP on all GPUs of the cluster.

    ray-on-ecs run ray_train_ddp.py --epochs 5          # on the cluster
    ray-on-ecs run --local ray_train_ddp.py             # on this machine
    python ray_train_ddp.py BUCKET --name first         # by hand, on the Ray head or on a laptop

The folder of the run gets model.safetensors and best.safetensors: the weights after the last epoch, and after the epoch
with the best test accuracy. The same command with the same name resumes from the last checkpoint. The file uses Ray
Train's public API: copy it (ray-on-ecs recipe copy ray_train_ddp) and change it.
"""

from __future__ import annotations

import os

# Before Ray is imported, so that the line of each worker is shown, and once.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")

import argparse
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from filelock import FileLock
from pyarrow.fs import copy_files
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision.datasets import FashionMNIST
from torchvision.models import resnet18

from ray_on_ecs.recipes.options import Options, number, source, whole
from ray_on_ecs.recipes.ray_programs import choose_workers, run_folder, run_name, storage_path

CACHE = Path("~/.cache/ray-on-ecs").expanduser()


def train(config: dict[str, Any]) -> None:
    """Train on one worker; Ray Train calls it on each of them, and again on all after a failure."""
    context, device = ray.train.get_context(), get_device()
    rank, world_size = context.get_world_rank(), context.get_world_size()

    # Every worker has all the images, and Ray Train gives its loader a share of them.
    train_data, test_data = load(config["data"])
    # A small data set has smaller batches, as a few steps in an epoch teach little.
    batch_size = config["batch_size"] or min(128, max(2, len(train_data) // (12 * world_size)))
    train_loader = prepare_data_loader(DataLoader(train_data, batch_size, shuffle=True))
    # The shares of the test are disjoint; a DistributedSampler would repeat images to make them equal.
    share = Subset(test_data, range(rank, len(test_data), world_size))
    test_loader = prepare_data_loader(DataLoader(share, batch_size), add_dist_sampler=False)

    # The seed gives all workers the same weights, and prepare_model moves them to the device and into DDP.
    torch.manual_seed(config["seed"])
    network = build_model()
    model = prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            network.load_state_dict(load_file(Path(folder, "model.safetensors")))
            state = torch.load(Path(folder, "state.pt"), device, weights_only=True)
        if state["data"] != config["data"]:
            raise ValueError(f"the run has trained on {state['data']} so far; add --data {state['data']}")
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, config["epochs"]):
        # ---- train
        started = time.perf_counter()
        torch.manual_seed(epoch)  # the order of the images, if there is one worker
        if isinstance(train_loader.sampler, DistributedSampler):
            train_loader.sampler.set_epoch(epoch)
        train_loss = trained = test_loss = correct = tested = 0.0
        model.train()
        for images, labels in train_loader:
            loss = cross_entropy(model(normalize(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(labels)
            trained += len(labels)
        place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
        print(
            f"[Epoch {epoch} | {place}: Process rank {rank} | Batchsize: {batch_size} | Steps: {len(train_loader)} "
            f"| Total epoch time: {time.perf_counter() - started}]",
            flush=True,
        )

        # ---- test, with the weights that are saved: rank 0's statistics of batch norm
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)
        network.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                logits = network(normalize(images))
                test_loss += cross_entropy(logits, labels, reduction="sum").item()
                correct += (logits.argmax(1) == labels).sum().item()
                tested += len(labels)

        # ---- report the sums over all workers, with a checkpoint of rank 0
        sums = torch.tensor([train_loss, trained, test_loss, correct, tested], device=device, dtype=torch.float64)
        dist.all_reduce(sums)
        train_loss, trained, test_loss, correct, tested = sums.tolist()
        metrics = {"epoch": epoch, "train_loss": train_loss / trained}
        metrics |= {"loss": test_loss / tested, "accuracy": correct / tested, "seconds": time.perf_counter() - started}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                print(", ".join(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
                save_file(network.state_dict(), Path(folder, "model.safetensors"))
                state = {"optimizer": optimizer.state_dict(), "epoch": epoch, "data": config["data"]}
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def build_model() -> nn.Module:
    """Return resnet18 for ten classes of gray images."""
    network = resnet18(num_classes=10)
    network.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return network


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images with a mean of 0 and a variance of 1, as Fashion-MNIST's are in the mean."""
    return (images.float() / 255 - 0.2860) / 0.3530


def load(name: str) -> list[TensorDataset]:
    """Return uint8 images [n, 1, 28, 28] with their labels, for training and for the test."""
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, targets = load_digits(return_X_y=True)
        small = torch.from_numpy(pixels * (255 / 16)).float().reshape(-1, 1, 8, 8)
        images, labels = interpolate(small, size=(28, 28), mode="bilinear").to(torch.uint8), torch.from_numpy(targets)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return [TensorDataset(images[part], labels[part].long()) for part in order.tensor_split([len(order) * 4 // 5])]
    root = CACHE if name == "fashion-mnist" else Path(name)
    with FileLock(Path(tempfile.gettempdir(), f"fashion-mnist-{os.getuid()}.lock")):  # one download for each node
        parts = [FashionMNIST(str(root), train=part, download=root == CACHE) for part in (True, False)]
    return [TensorDataset(part.data.unsqueeze(1), part.targets) for part in parts]


def fashion_mnist_or_digits() -> str:
    """Return fashion-mnist if it is here or can be downloaded, or else digits, which scikit-learn brings."""
    if (CACHE / "FashionMNIST" / "raw").is_dir():
        return "fashion-mnist"
    try:
        urllib.request.urlopen(FashionMNIST.mirrors[0] + FashionMNIST.resources[-1][0], timeout=5).close()  # nosec B310 # constant
    except OSError as cause:
        print(f"Fashion-MNIST can't be downloaded ({cause}): training on handwritten digits", flush=True)
        return "digits"
    return "fashion-mnist"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = Options(__doc__)
    add = parser.add_argument
    add("storage", nargs="?", type=storage_path, metavar="BUCKET", help="without a run: bucket, s3://… or ./folder")
    add("--name", type=run_name, help="name of the folder in BUCKET; with the same one the training resumes")
    built_in = ("auto", "fashion-mnist", "digits")
    add(
        "--data", type=source(*built_in), default="auto", help="fashion-mnist, digits or a folder with FashionMNIST/raw"
    )
    add("--epochs", type=whole(), default=10, help="(%(default)s)")
    add("--batch-size", type=whole(), help="images of a step on each worker (128, less for a small data set)")
    add("--lr", type=number(above=0), default=1e-3, help="learning rate of Adam (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the weights (%(default)s)")
    add("--num-workers", type=whole(), help="a worker for each GPU of the cluster, or two on CPUs")
    add("--use-gpu", action=argparse.BooleanOptionalAction, help="train on GPUs, if the cluster has some")
    return parser.parse_args()


def main() -> None:
    """Train, and keep the last and the best weights."""
    args = parse()
    if args.data == "auto":
        args.data = fashion_mnist_or_digits()
    ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(**choose_workers(args.num_workers, use_gpu=args.use_gpu)),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=args.storage,
            # The best checkpoint; Ray Train keeps the last one, too.
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"Result(metrics={result.metrics}, path={result.path!r})")
    filesystem, folder = run_folder(result)
    for name, checkpoint in (("model", result.checkpoint), ("best", result.get_best_checkpoint("accuracy", "max"))):
        weights = f"{checkpoint.path}/model.safetensors"
        copy_files(weights, f"{folder}/{name}.safetensors", checkpoint.filesystem, filesystem)
    print(f"the weights are in {folder}: model.safetensors of the last epoch, best.safetensors of the best one")


if __name__ == "__main__":
    main()
