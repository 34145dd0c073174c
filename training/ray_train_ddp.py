"""Distributed training with Ray Train: resnet18 on Fashion-MNIST, with DDP on all GPUs of the cluster.

    ray-on-ecs run ray_train_ddp.py --epochs 5          # on the cluster
    ray-on-ecs run --local ray_train_ddp.py             # on this machine
    python ray_train_ddp.py BUCKET --name first         # by hand, on the Ray head or on a laptop

The folder of the run gets model.safetensors and best.safetensors: the weights after the last epoch, and after the epoch
with the best test accuracy. The same command with the same name resumes from the last checkpoint. All calls of Ray are
public ones: copy the file (ray-on-ecs recipe copy ray_train_ddp) and change it.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # before Ray is imported: the line of each worker, and once
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")

import argparse
import tempfile
import time
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision.models import resnet18

from ray_on_ecs.recipes.image_batches import ImagesInMemory
from ray_on_ecs.recipes.images import BUILT_IN, load_images
from ray_on_ecs.recipes.options import Options, fail, number, source, whole
from ray_on_ecs.recipes.ray_programs import add_options, choose_workers, export


def train(config: dict[str, Any]) -> None:
    """Train on one worker: Ray Train calls it on each of them, and again on all after a failure."""
    context, device = ray.train.get_context(), get_device()
    rank, world_size = context.get_world_rank(), context.get_world_size()

    # ---- Data: every worker has all the images, and Ray Train gives its loader a share of them
    data = load_data(config["data"])
    [mean], [std] = data.mean, data.std  # of the one channel
    batch_size = config["batch_size"] or min(128, max(2, len(data) // (20 * world_size)))  # at least 20 steps an epoch
    train_loader = prepare_data_loader(DataLoader(TensorDataset(*data.train), batch_size, shuffle=True))
    # A DistributedSampler would test some images twice, to make the shares equal.
    share = Subset(TensorDataset(*data.test), range(rank, len(data.test[1]), world_size))
    test_loader = prepare_data_loader(DataLoader(share, batch_size), add_dist_sampler=False)

    # ---- Model and optimizer, from the last checkpoint if there is one
    torch.manual_seed(config["seed"])  # the same weights on all workers
    network = build_model()
    model = prepare_model(network)  # on the device, and wrapped in DDP
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            network.load_state_dict(load_file(f"{folder}/model.safetensors"))
            state = torch.load(f"{folder}/state.pt", device, weights_only=True)
        if state["data"] != config["data"]:
            raise ValueError(f"the run has trained on {state['data']} so far; add --data {state['data']}")
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, config["epochs"]):
        # ---- Training
        started = time.perf_counter()
        torch.manual_seed(epoch)  # the order of the images, if there is one worker
        if isinstance(train_loader.sampler, DistributedSampler):
            train_loader.sampler.set_epoch(epoch)
        train_loss = trained = test_loss = correct = tested = 0.0
        model.train()
        for images, labels in train_loader:
            loss = cross_entropy(model((images - mean) / std), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(labels)
            trained += len(labels)
        place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
        print(f"[Epoch {epoch} | {place}: Process rank {rank} | Batchsize: {batch_size} | Steps: {len(train_loader)} "
              f"| Total epoch time: {time.perf_counter() - started}]", flush=True)  # fmt: skip

        # ---- Test, with the batch norm's statistics of rank 0, which are saved
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)
        network.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                logits = network((images - mean) / std)
                test_loss += cross_entropy(logits, labels, reduction="sum").item()
                correct += (logits.argmax(1) == labels).sum().item()
                tested += len(labels)
        sums = torch.tensor([train_loss, trained, test_loss, correct, tested], device=device, dtype=torch.float64)
        dist.all_reduce(sums)
        train_loss, trained, test_loss, correct, tested = sums.tolist()
        metrics = {"epoch": epoch, "train_loss": train_loss / trained, "loss": test_loss / tested}
        metrics |= {"accuracy": correct / tested, "seconds": time.perf_counter() - started}

        # ---- Report, with the checkpoint of rank 0
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                print(", ".join(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
                save_file(network.state_dict(), f"{folder}/model.safetensors")
                state = {"optimizer": optimizer.state_dict(), "epoch": epoch, "data": config["data"]}
                torch.save(state, f"{folder}/state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def load_data(name: str) -> ImagesInMemory:
    """Load uint8 images [n, 1, 28, 28] and their labels [n], as `train` and `test`."""
    data = load_images(name)
    if not isinstance(data, ImagesInMemory):
        fail(f"argument --data: {name!r} lacks FashionMNIST/raw/; image_classifier.py trains on photographs")
    return data


def build_model() -> nn.Module:
    """Return resnet18 for images with one channel in ten classes."""
    network = resnet18(num_classes=10)
    network.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return network


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = add_options(Options(__doc__))
    add = parser.add_argument
    add("--data", type=source(*BUILT_IN), default="auto", help="fashion-mnist, digits, or FOLDER with FashionMNIST/raw")
    add("--epochs", type=whole(), default=10, help="(%(default)s)")
    add("--batch-size", type=whole(), help="images of a step on each worker (128, or less of a small data set)")
    add("--lr", type=number(above=0), default=1e-3, help="learning rate of Adam (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the weights (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, and keep the last and the best weights."""
    args = parse()
    data = load_data(args.data)  # here, too, since a mistake shall end the program before it starts workers
    args.data = data.name if args.data == "auto" else args.data
    ray.init()
    scaling = ray.train.ScalingConfig(**choose_workers(ray.cluster_resources(), args.num_workers, args.use_gpu))
    keep = ray.train.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")  # the best, and the last
    retry = ray.train.FailureConfig(max_failures=3)
    run = ray.train.RunConfig(args.name, args.storage, checkpoint_config=keep, failure_config=retry)
    result = TorchTrainer(train, train_loop_config=vars(args), scaling_config=scaling, run_config=run).fit()
    print(f"Result(metrics={result.metrics}, path={result.path!r})")
    export(result, result.checkpoint, "model.safetensors")
    export(result, result.get_best_checkpoint("accuracy", "max"), "best.safetensors")


if __name__ == "__main__":
    main()
