"""Ray Data and Ray Train: CPU workers prepare images, and GPU workers train on them.

usage: python training/preprocess.py [BUCKET | ./FOLDER] [--images s3://bucket/photos] [--cpu-workers] [--name NAME] ...

The images are those of a folder or bucket with a folder for each class, or generated. On a stack with CPU workers these
prepare them; otherwise the CPUs that the training leaves do, as on a laptop. The same command with the same --name and
storage resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# The label that a stack gives to its CPU workers: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
NODE_GROUP, CPU_WORKERS = "ray.io/node-group", "cpu-workers"


def generate(batch: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Make an image of noise for each number, in one of three colors, which is its class."""
    import numpy as np

    labels = batch["id"] % 3
    images = np.random.default_rng(batch["id"][0]).integers(0, 156, (len(labels), size, size, 3), dtype=np.uint8)
    images[np.arange(len(labels)), :, :, labels] += 100
    return {"image": images, "label": labels}


def label(batch: dict[str, np.ndarray], classes: list[str]) -> dict[str, np.ndarray]:
    """Label each image by the folder that it is in."""
    import numpy as np

    labels = [classes.index(path.split("/")[-2]) for path in batch["path"]]
    return {"image": batch["image"], "label": np.array(labels)}


def prepare(batch: dict[str, np.ndarray], blurs: int) -> dict[str, np.ndarray]:
    """Blur the images again and again, which takes more time than training on them, and note where."""
    import numpy as np
    import ray
    import torch
    from torchvision.transforms.v2.functional import gaussian_blur

    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255
    for _ in range(blurs):
        images = gaussian_blur(images, [11, 11])
    places = np.full(len(images), ray.util.get_node_ip_address())
    return {"image": images.numpy(), "label": batch["label"], "place": places}


def train(config: dict[str, Any]) -> None:
    """Train on one worker's share of the images, and save a checkpoint after each epoch."""
    import ray.train
    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device, prepare_model
    from torchvision.models import resnet18

    network = resnet18(num_classes=config["classes"])
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), "cpu", weights_only=True)
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
            images, labels = (torch.tensor(batch[name], device=get_device()) for name in ("image", "label"))
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            places.update(batch["place"].tolist())
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (total, places))
        by_place = sum((share[1] for share in shares), Counter())
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
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "loss": loss, "images_per_second": speed}, checkpoint=checkpoint)


def uri(text: str) -> str:
    """Convert a bucket's name, s3://bucket/prefix or a folder, which has a slash or exists, to what Ray Data takes."""
    if "://" in text:
        return text
    return str(Path(text).expanduser().absolute()) if "/" in text or Path(text).is_dir() else f"s3://{text}"


def parse() -> argparse.Namespace:
    """Check the options, before importing Ray and torch, which takes seconds."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # without a usage, an error is one line
    add = parser.add_argument
    add("storage", nargs="?", type=uri, metavar="BUCKET", help="bucket, s3://bucket/prefix, or ./folder")
    add("--name", help="name of the run; with the same name and storage it resumes")
    add("--images", type=uri, help="the same, with a folder for each class; by default the images are generated")
    add("--records", type=int, default=2048, help="number of generated images (%(default)s)")
    add("--size", type=int, default=64, help="height and width of the images (%(default)s)")
    add("--blurs", type=int, default=10, help="how often an image is blurred (%(default)s)")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=64, help="images of a step on each worker (%(default)s)")
    add("--num-workers", type=int, help="by default one for each GPU of the cluster, or one on a CPU")
    add("--use-gpu", action=argparse.BooleanOptionalAction, help="by default if the cluster has GPUs")
    add(
        "--cpu-workers",
        action=argparse.BooleanOptionalAction,
        help="prepare on CPU workers; by default if there are some",
    )
    args = parser.parse_args()
    for name in ("records", "size", "epochs", "batch_size", "num_workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {value} is not at least 1")
    try:
        args.classes = folders(args.images) if args.images else ["red", "green", "blue"]
    except (OSError, ValueError) as error:
        parser.error(f"argument --images: {str(error).splitlines()[0]}")
    return args


def folders(images: str) -> list[str]:
    """Return the names of the folders in this folder or bucket, which are the classes."""
    from pyarrow.fs import FileSelector, FileSystem, FileType

    filesystem, path = FileSystem.from_uri(images)
    infos = filesystem.get_file_info(FileSelector(path))
    names = sorted(info.base_name for info in infos if info.type is FileType.Directory)
    if len(names) < 2:
        raise ValueError(f"{images} needs a folder for each class")
    return names


def main() -> None:
    """Prepare and train, side by side."""
    args = parse()
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # or Ray Train prints the workers' lines twice

    import ray
    from ray.data import ExecutionOptions
    from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init()
    if args.images:
        size = (args.size, args.size)
        files = ray.data.read_images(args.images, size=size, mode="RGB", include_paths=True, shuffle="files")
        data = files.map_batches(label, fn_kwargs={"classes": args.classes})
    else:
        blocks = -(-args.records // args.batch_size)
        numbers = ray.data.range(args.records, override_num_blocks=blocks)
        data = numbers.map_batches(generate, batch_size=64, fn_kwargs={"size": args.size})
    data = data.map_batches(prepare, batch_size=64, fn_kwargs={"blurs": args.blurs})

    gpus = int(ray.cluster_resources().get("GPU", 0))
    use_gpu = gpus > 0 if args.use_gpu is None else args.use_gpu
    are_there = any(node["Alive"] and node["Labels"].get(NODE_GROUP) == CPU_WORKERS for node in ray.nodes())
    cpu_workers = are_there if args.cpu_workers is None else args.cpu_workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"classes": len(args.classes), "epochs": args.epochs, "batch_size": args.batch_size},
        datasets={"train": data},
        dataset_config=DataConfig(
            execution_options=ExecutionOptions(label_selector={NODE_GROUP: CPU_WORKERS} if cpu_workers else None)
        ),
        scaling_config=ScalingConfig(
            num_workers=args.num_workers or (gpus if use_gpu else 0) or 1,
            use_gpu=use_gpu,
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
