"""Ray Data and Ray Train: CPU workers prepare images, and GPU workers train on them.

    ray-on-ecs run preprocess.py --images s3://photos          # on the cluster
    ray-on-ecs run --local preprocess.py --epochs 2            # on this machine
    python preprocess.py BUCKET --name first                   # by hand, on the Ray head or on a laptop

The images are those of a folder or bucket with a folder for each class, or generated. On a stack with CPU workers these
prepare them; otherwise the CPUs that the training leaves do. Preparing an image takes longer than training on it, on
purpose: replace slow_blur with what your images need. The same command with the same name resumes the training.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # before Ray is imported: the lines of workers, and once

import argparse
import tempfile
import time
from collections import Counter
from typing import Any

import numpy as np
import ray.data
import ray.train
import torch
import torch.distributed as dist
from pyarrow.fs import FileSelector, FileSystem, FileType
from ray.data import ExecutionOptions
from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18
from torchvision.transforms.v2.functional import gaussian_blur

from ray_on_ecs.recipes.options import Options, fail, whole
from ray_on_ecs.recipes.ray_programs import add_options, choose_workers, storage_path

# The label that a stack gives to its CPU workers: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
NODE_GROUP, CPU_WORKERS = "ray.io/node-group", "cpu-workers"


def generate(batch: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Make an image of noise for each number, in one of three colors, which is its class."""
    labels = batch["id"] % 3
    images = np.random.default_rng(batch["id"][0]).integers(0, 156, (len(labels), size, size, 3), dtype=np.uint8)
    images[np.arange(len(labels)), :, :, labels] += 100
    return {"image": images, "label": labels}


def label(batch: dict[str, np.ndarray], classes: list[str]) -> dict[str, np.ndarray]:
    """Label each image by the folder that it is in."""
    labels = [classes.index(path.split("/")[-2]) for path in batch["path"]]
    return {"image": batch["image"], "label": np.array(labels)}


def slow_blur(batch: dict[str, np.ndarray], blurs: int) -> dict[str, np.ndarray]:
    """Burn CPU time by blurring the images again and again, and note on which node."""
    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255
    for _ in range(blurs):
        images = gaussian_blur(images, [11, 11])
    places = np.full(len(images), ray.util.get_node_ip_address())
    return {"image": images.numpy(), "label": batch["label"], "place": places}


def train(config: dict[str, Any]) -> None:
    """Train on one worker's share of the images, and save a checkpoint after each epoch."""
    network = resnet18(num_classes=config["classes"])
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", "cpu", weights_only=True)
        network.load_state_dict(saved["network"])
        first = saved["epoch"] + 1
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if first:
        optimizer.load_state_dict(saved["optimizer"])
    shard = ray.train.get_dataset_shard("train")

    for epoch in range(first, config["epochs"]):
        started, total, places = time.perf_counter(), 0.0, Counter()
        for batch in shard.iter_batches(
            batch_size=config["batch_size"], local_shuffle_buffer_size=4 * config["batch_size"]
        ):
            if len(batch["label"]) == 1:  # the last of all workers, which have as many images each
                continue  # batch norm refuses a single image
            images, labels = (torch.tensor(batch[name], device=get_device()) for name in ("image", "label"))
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            places.update(batch["place"].tolist())
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (total, places))
        by_place = sum((share[1] for share in shares), Counter())
        if not by_place:
            raise ValueError("there are fewer than two images for each worker; give more, or fewer workers")
        loss = sum(share[0] for share in shares) / by_place.total()
        speed = by_place.total() / (time.perf_counter() - started)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                print(
                    f"epoch {epoch}: loss {loss:.4f}, {by_place.total()} images, {speed:.1f} a second, "
                    f"prepared on {dict(by_place)}",
                    flush=True,
                )
                state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, f"{folder}/state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            metrics = {"epoch": epoch, "loss": loss, "images_per_second": speed}
            ray.train.report({**metrics, "total_steps": config["epochs"]}, checkpoint=checkpoint)  # for the time left


def classes_in(images: str) -> list[str]:
    """Return the names of the folders in this folder or bucket, which are the classes."""
    filesystem, path = FileSystem.from_uri(images)
    infos = filesystem.get_file_info(FileSelector(path))
    names = sorted(info.base_name for info in infos if info.type is FileType.Directory)
    if len(names) < 2:
        raise ValueError(f"{images} needs a folder for each class")
    return names


def load(args: argparse.Namespace, classes: list[str]) -> ray.data.Dataset:
    """Return the images, or as many generated ones, which are not prepared."""
    if args.images:
        size = (args.size, args.size)
        files = ray.data.read_images(args.images, size=size, mode="RGB", include_paths=True, shuffle="files")
        return files.map_batches(label, fn_kwargs={"classes": classes})
    numbers = ray.data.range(args.records, override_num_blocks=-(-args.records // args.batch_size))
    return numbers.map_batches(generate, batch_size=64, fn_kwargs={"size": args.size})


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = add_options(Options(__doc__))
    add = parser.add_argument
    add("--images", type=storage_path, metavar="BUCKET", help="with a folder for each class; by default generated ones")
    add("--records", type=whole(), default=2048, help="number of generated images (%(default)s)")
    add("--size", type=whole(), default=64, help="height and width of the images (%(default)s)")
    add("--blurs", type=whole(0), default=10, help="how often an image is blurred (%(default)s)")
    add("--epochs", type=whole(), default=5, help="(%(default)s)")
    add("--batch-size", type=whole(2), default=64, help="images of a step on each worker (%(default)s)")
    add("--cpu-workers", action=argparse.BooleanOptionalAction, help="prepare on CPU workers, if there are some")
    return parser.parse_args()


def main() -> None:
    """Prepare and train, side by side."""
    args = parse()
    try:
        classes = classes_in(args.images) if args.images else ["red", "green", "blue"]
    except (OSError, ValueError) as error:
        fail(f"argument --images: {str(error).splitlines()[0]}")
    ray.init()
    data = load(args, classes).map_batches(slow_blur, batch_size=64, fn_kwargs={"blurs": args.blurs})
    are_there = any(node["Alive"] and node["Labels"].get(NODE_GROUP) == CPU_WORKERS for node in ray.nodes())
    cpu_workers = are_there if args.cpu_workers is None else args.cpu_workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"classes": len(classes), "epochs": args.epochs, "batch_size": args.batch_size},
        datasets={"train": data},
        dataset_config=DataConfig(
            execution_options=ExecutionOptions(label_selector={NODE_GROUP: CPU_WORKERS} if cpu_workers else None)
        ),
        scaling_config=ScalingConfig(  # without GPUs one worker, since the other CPUs prepare the images
            **choose_workers(ray.cluster_resources(), args.num_workers, args.use_gpu, on_cpus=1),
            label_selector={NODE_GROUP: f"!{CPU_WORKERS}"} if cpu_workers else None,
        ),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
