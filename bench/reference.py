"""The reference: a plain Ray Train loop that makes the choices of the script in the ECS blog post.

usage: python -m bench.reference --data-dir FOLDER --storage-path FOLDER [--seed N] [--epochs N]

resnet18 for one channel, Adam at 1e-3, 128 images per worker, fp32, a DataLoader that converts and normalizes image by
image, ten epochs, and Ray Train's `prepare_model` and `prepare_data_loader`. So that it can be compared, and unlike the
post's script, it measures accuracy over the whole test set and shuffles anew in each epoch. Prints a line of JSON for
each epoch.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from training.recipes.images.models import resnet18_classifier

BATCH_SIZE = 128
LEARNING_RATE = 1e-3
EPOCHS = 10
WORKERS = 2
# Of Fashion-MNIST's training images, scaled to 0..1.
MEAN, STD = 0.2860, 0.3530


def loader(root: Path, train: bool) -> DataLoader:
    """Return a loader that decodes, converts and normalizes image by image."""
    dataset = FashionMNIST(root, train=train, transform=Compose([ToTensor(), Normalize((MEAN,), (STD,))]))
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=train)


def epochs(
    model: nn.Module, train: DataLoader, test: DataLoader, device: torch.device, number: int
) -> Iterator[dict[str, Any]]:
    """Train, and yield each epoch's seconds, with and without the test, and its test accuracy (0..1)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(number):
        started = time.perf_counter()
        if dist.is_initialized() and dist.get_world_size() > 1:
            train.sampler.set_epoch(epoch)  # ty: ignore[missing-attribute]
        model.train()
        for images, labels in train:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = time.perf_counter()
        accuracy = _accuracy(model, test, device)
        seconds = time.perf_counter() - started
        yield {
            "epoch": epoch,
            "seconds": seconds,
            "train_seconds": trained - started,
            "test_accuracy": accuracy,
            "finished": time.time(),
        }


@torch.no_grad()
def _accuracy(model: nn.Module, test: DataLoader, device: torch.device) -> float:
    """Return the accuracy over all ranks' test images."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in test:
        correct: Tensor = model(images.to(device)).argmax(1) == labels.to(device)
        totals += torch.tensor([correct.sum(), len(labels)], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def train_on_worker(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run on each Ray Train worker; rank 0's epochs are the result."""
    from ray.train.torch import get_device, prepare_data_loader, prepare_model

    torch.manual_seed(settings["seed"])
    model = prepare_model(resnet18_classifier(1, 10))
    parts = [prepare_data_loader(loader(Path(settings["root"]), train)) for train in (True, False)]
    return list(epochs(model, *parts, get_device(), settings["epochs"]))


def main() -> None:
    """Train through Ray Train on two CPU workers of one thread each."""
    import ray
    from ray.train import LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(prog="python -m bench.reference")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that has FashionMNIST/raw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--storage-path", type=Path, required=True)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=WORKERS, logging_level=logging.ERROR)
    settings = {"root": str(arguments.data_dir), "seed": arguments.seed, "epochs": arguments.epochs}
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(arguments.storage_path), logging_config=LoggingConfig(log_level="WARNING")
        ),
    )
    result: Any = trainer.fit()
    for metrics in result.return_value:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
