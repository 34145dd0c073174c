"""Distributed training with Ray Train: resnet18 on Fashion-MNIST, with DDP on all GPUs of the cluster.

    ray-on-ecs run ray_train_ddp.py --epochs 5          # on the cluster
    ray-on-ecs run --local ray_train_ddp.py             # on this machine
    python ray_train_ddp.py BUCKET --name first         # by hand, on the Ray head or on a laptop

The folder of the run gets model.safetensors and best.safetensors: the weights after the last epoch, and after the epoch
with the best test accuracy. The same command with the same name resumes from the last checkpoint. Copy and change it.
"""

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
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision.models import resnet18

from ray_on_ecs.recipes.images import BUILT_IN, ImagesInMemory, load_images_in_memory
from ray_on_ecs.recipes.options import Options, fail, number, source, whole
from ray_on_ecs.recipes.ranks import usable_cpus
from ray_on_ecs.recipes.ray_programs import add_options, choose_workers, export_last_and_best, for_workers

BEST = "test_accuracy"  # the metric of the best weights; the greater, the better


def train(config: dict[str, Any]) -> None:
    """Train on one worker: Ray Train calls it on each of them, and again on all after a failure."""
    context, device = ray.train.get_context(), get_device()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
    if device.type == "cpu":  # Ray gives each worker one thread
        torch.set_num_threads(max(1, usable_cpus() // context.get_local_world_size()))

    # ---- Data: every worker has all the images, and its samplers choose a share of them
    checkpoint = ray.train.get_checkpoint()
    saved = checkpoint.get_metadata() if checkpoint else {}
    data = load_data(saved["data"] if saved and config["auto"] else config["data"])  # auto keeps its first choice
    if saved.get("data", data.name) != data.name:
        raise ValueError(f"the run has trained on {saved['data']} so far; --data gives {data.name}")
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (data.mean, data.std))
    sampler = DistributedSampler(TensorDataset(*data.train), world_size, rank, seed=config["seed"])
    default = max(8, min(128, len(sampler) // 20))  # at least 20 steps in an epoch, unless the data set is very small
    batch_size = min(config["batch_size"] or default, len(sampler))  # drop_last, since batch norm refuses one image
    train_loader = prepare_data_loader(DataLoader(sampler.dataset, batch_size, sampler=sampler, drop_last=True))
    share = Subset(TensorDataset(*data.test), range(rank, len(data.test[1]), world_size))  # each image once
    test_loader = prepare_data_loader(DataLoader(share, 128), add_dist_sampler=False)

    # ---- Model and optimizer, from the last checkpoint if there is one
    torch.manual_seed(config["seed"])  # the same weights on all workers
    network = build_model(data.shape[0], len(data.class_names))
    model = prepare_model(network, parallel_strategy_kwargs={"forward_sync_buffers": False})  # on the device, in DDP
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], fused=True)
    if checkpoint:
        with checkpoint.as_directory() as folder:
            load_model(network, f"{folder}/model.safetensors")
            optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", "cpu", weights_only=True))
        optimizer.param_groups[0]["lr"] = config["lr"]  # not that of the checkpoint

    for epoch in range(saved.get("epoch", -1) + 1, config["epochs"]):
        # ---- Training
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        torch.manual_seed((config["seed"] * 1000 + epoch) * world_size + rank)  # for dropout, if you add some
        sums = torch.zeros(3, device=device, dtype=torch.float64)  # of train losses, test losses and right answers
        model.train()
        for images, labels in train_loader:
            loss = cross_entropy(model((images - mean) / std), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach()  # loss.item() would wait for the GPU
        print(f"[Epoch {epoch} | {place}: Process rank {rank} | Batchsize: {batch_size} | Steps: {len(train_loader)} "
              f"| Total epoch time: {time.perf_counter() - started}]", flush=True)  # fmt: skip

        # ---- Test, with the batch norm's statistics of rank 0, which are saved
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)
        network.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                logits = network((images - mean) / std)
                sums[1] += cross_entropy(logits, labels, reduction="sum")
                sums[2] += (logits.argmax(1) == labels).sum()
        dist.all_reduce(sums)
        if not sums.isfinite().all():
            return  # on all workers; after an error Ray would train the epoch again, to the same end
        train_loss, test_loss, right = sums.tolist()
        metrics = {"epoch": epoch, "train_loss": train_loss / len(train_loader) / world_size}
        metrics |= {"test_loss": test_loss / len(data.test[1]), BEST: right / len(data.test[1])}
        metrics["seconds"] = time.perf_counter() - started

        # ---- Report, with the checkpoint of rank 0
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            if checkpoint:
                print(", ".join(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
                save_model(network, f"{folder}/model.safetensors")
                torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
                checkpoint.set_metadata({"epoch": epoch, "data": data.name})
            ray.train.report({**metrics, "total_steps": config["epochs"]}, checkpoint=checkpoint)  # for the time left


def load_data(name: str) -> ImagesInMemory:
    """Return ImagesInMemory(name, class_names, train, test): uint8 images [n, C, H, W] and int64 labels [n] in each."""
    return load_images_in_memory(name)


def build_model(channels: int, classes: int) -> nn.Module:
    """Return resnet18 for small images."""
    network = resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return network


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = add_options(Options(__doc__))
    add = parser.add_argument
    add("--data", type=source(*BUILT_IN), default="auto", help="fashion-mnist, digits, or FOLDER with FashionMNIST/raw")
    add("--epochs", type=whole(), default=10, help="(%(default)s)")
    add("--batch-size", type=whole(2), help="images of a step on each worker (128, or less of a small data set)")
    add("--lr", type=number(above=0), default=1e-3, help="learning rate of Adam (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the weights (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, and keep the last and the best weights."""
    args = parse()
    name = load_data(args.data).name  # here, too, since a mistake shall end the program before it starts workers
    is_auto = args.data == "auto"
    config = {**vars(args), "auto": is_auto, "data": name if is_auto else for_workers(args.data)}
    ray.init()
    scaling = ray.train.ScalingConfig(**choose_workers(ray.cluster_resources(), args.num_workers, args.use_gpu))
    keep = ray.train.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute=BEST)  # the best, and the last
    failures = ray.train.FailureConfig(max_failures=3)
    run = ray.train.RunConfig(args.name, args.storage, checkpoint_config=keep, failure_config=failures)
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(f"Result(metrics={result.metrics}, path={result.path!r})")
    export_last_and_best(result, BEST)
    if not result.metrics or result.metrics["epoch"] + 1 < args.epochs:
        fail("the loss is not finite; try a smaller --lr")


if __name__ == "__main__":
    main()
