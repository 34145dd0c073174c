"""Ray Train DDP: resnet18 on Fashion-MNIST, with only Ray Train's public API.

usage: python training/ray_train_ddp.py [BUCKET | s3://BUCKET/PREFIX | ./FOLDER] [--name NAME] [--epochs N] ...

In a shell on the Ray head it trains on the cluster's GPUs, with the stack's bucket as its argument; on a laptop it
starts Ray itself. The same command with the same --name resumes from the last checkpoint. The file is self-contained:
copy it and change it.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CLASSES, SIDE = 10, 28
MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's training images, scaled to 0..1
DATA_DIR = "~/.cache/ray-on-ecs"
# The lines of all workers, each once: Ray would fold them into one, and Ray Train would print them twice.
LOG = {"RAY_DEDUP_LOGS": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}


def positive(text: str) -> int:
    """Convert an option's value to a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def storage_path(text: str) -> str:
    """Convert a bucket's name, s3://bucket/prefix or a folder, which has a slash or exists, to Ray's storage path."""
    if "://" in text:
        return text.rstrip("/")
    if "/" in text or Path(text).is_dir():
        return str(Path(text).expanduser().absolute())
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", text):
        return f"s3://{text}"
    raise argparse.ArgumentTypeError(f"{text!r} is neither a bucket nor a folder; write a folder as ./{text}")


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Check the options, before importing torch, which takes seconds."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # without a usage, an error is one line
    add = parser.add_argument
    add("storage", nargs="?", type=storage_path, metavar="BUCKET", help="bucket, s3://bucket/prefix, or ./folder")
    add("--name", help="name of the run; with the same name and storage it resumes")
    add("--epochs", type=positive, default=10)
    add("--batch-size", type=positive, default=128, help="images of a step on each worker (%(default)s)")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights (%(default)s)")
    add("--num-workers", type=positive, help="by default one for each GPU of the cluster, or two on CPUs")
    add("--use-gpu", action=argparse.BooleanOptionalAction, help="by default if the cluster has GPUs")
    add("--data-dir", default=DATA_DIR, help="each node's folder of torchvision's FashionMNIST/raw (%(default)s)")
    add("--synthetic", type=positive, nargs="?", const=2048, metavar="N", help="train on N generated images instead")
    args = parser.parse_args()
    if not 0 < args.lr < float("inf"):
        parser.error(f"argument --lr: {args.lr} is not positive")
    if not re.fullmatch(r"\w[\w.-]*", args.name or "unnamed"):
        parser.error(f"argument --name: {args.name!r} is not of letters, digits, dots, dashes and underscores")
    return parser, args


def check_bucket(parser: argparse.ArgumentParser, uri: str) -> None:
    """End with one line if the bucket does not exist."""
    from pyarrow.fs import FileSystem, FileType

    try:
        filesystem, path = FileSystem.from_uri(uri)
        if filesystem.get_file_info(path.partition("/")[0]).type is FileType.NotFound:
            parser.error(f"{uri}: this bucket does not exist")
    except (OSError, ValueError) as error:
        parser.error(f"{uri}: {str(error).splitlines()[0]}")


def choose_data(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return Fashion-MNIST if it is here or can be downloaded, or else the digits that scikit-learn brings."""
    from torchvision.datasets import FashionMNIST

    if args.synthetic:
        return "synthetic"
    raw = Path(args.data_dir).expanduser() / "FashionMNIST" / "raw"
    if all((raw / Path(name).stem).is_file() for name, _ in FashionMNIST.resources):
        return "fashion-mnist"
    try:
        urllib.request.urlopen(FashionMNIST.mirrors[0] + FashionMNIST.resources[-1][0], timeout=5).close()  # nosec B310 # constant
    except OSError as error:
        missing = f"Fashion-MNIST is not in {raw}, and can't be downloaded ({error})"
        if args.data_dir != DATA_DIR:
            parser.error(f"argument --data-dir: {missing}")
        print(f"{missing}: training on scikit-learn's handwritten digits", flush=True)
        return "digits"
    return "fashion-mnist"


def load(config: dict[str, Any]) -> list[Any]:
    """Load the data sets for training and test, of uint8 images [1, 28, 28] and their labels."""
    import torch
    from torch.utils.data import TensorDataset

    if config["data"] == "fashion-mnist":
        from filelock import FileLock
        from torchvision.datasets import FashionMNIST

        root = Path(config["data_dir"]).expanduser()
        with FileLock(Path(tempfile.gettempdir(), f"fashion-mnist-{os.getuid()}.lock")):  # one download for each node
            parts = [FashionMNIST(str(root), train=part, download=True) for part in (True, False)]
        return [TensorDataset(part.data.unsqueeze(1), part.targets) for part in parts]
    if config["data"] == "digits":
        from sklearn.datasets import load_digits

        pixels, targets = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels * (255 / 16)).reshape(-1, 1, 8, 8)
        images = torch.nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear").to(torch.uint8)
        labels = torch.from_numpy(targets).long()
    else:  # noise on one picture for each class
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(config["synthetic"] * 6 // 5) % CLASSES
        pictures = torch.randint(0, 128, (CLASSES, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        noise = torch.randint(0, 128, (len(labels), 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        images = pictures[labels] + noise
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in order.tensor_split([len(order) * 5 // 6])]


def train(config: dict[str, Any]) -> None:
    """Train on one worker, from the last checkpoint if there is one; test and save after each epoch."""
    import ray.train
    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device, prepare_data_loader, prepare_model
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, DistributedSampler, Subset
    from torchvision.models import resnet18

    context, device = ray.train.get_context(), get_device()
    rank, workers = context.get_world_rank(), context.get_world_size()
    place = f"GPU{device.index}" if device.type == "cuda" else "CPU"
    train_data, test_data = load(config)
    loader = prepare_data_loader(DataLoader(train_data, config["batch_size"], shuffle=True))
    # Each worker tests a separate share; a DistributedSampler would repeat images to make the shares equal.
    share = Subset(test_data, range(rank, len(test_data), workers))
    test_loader = prepare_data_loader(DataLoader(share, config["batch_size"]), add_dist_sampler=False)

    torch.manual_seed(config["seed"])  # the same weights on all workers
    network = resnet18(num_classes=CLASSES)
    network.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model = prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            weights, state = (
                torch.load(Path(folder, f"{name}.pt"), device, weights_only=True) for name in ("model", "state")
            )
        if state["data"] != config["data"]:
            raise ValueError(f"the run has trained on {state['data']} so far, not on {config['data']}")
        network.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        started = time.perf_counter()
        torch.manual_seed(epoch)  # the order of the images, if there is one worker
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        train_loss = trained = test_loss = correct = tested = 0.0
        model.train()
        for images, labels in loader:
            loss = cross_entropy(model(normalize(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(labels)
            trained += len(labels)
        print(
            f"[Epoch {epoch} | {place}: Process rank {rank} | Batchsize: {config['batch_size']} | Steps: {len(loader)} "
            f"| Total epoch time: {time.perf_counter() - started}]",
            flush=True,
        )

        for buffer in network.buffers():  # the statistics of batch norm, of which rank 0's are tested and saved
            dist.broadcast(buffer, 0)
        network.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                logits = network(normalize(images))
                test_loss += cross_entropy(logits, labels, reduction="sum").item()
                correct += (logits.argmax(1) == labels).sum().item()
                tested += len(labels)
        sums = torch.tensor([train_loss, trained, test_loss, correct, tested], device=device, dtype=torch.float64)
        dist.all_reduce(sums)
        train_loss, trained, test_loss, correct, tested = sums.tolist()
        metrics = {"epoch": epoch, "train_loss": train_loss / trained}
        metrics |= {"loss": test_loss / tested, "accuracy": correct / tested, "seconds": time.perf_counter() - started}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                print(", ".join(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
                state = {"optimizer": optimizer.state_dict(), "epoch": epoch, "data": config["data"]}
                torch.save(network.state_dict(), Path(folder, "model.pt"))
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def normalize(images: Any) -> Any:
    """Convert uint8 images to what the network learns from."""
    return (images.float() / 255 - MEAN) / STD


def main() -> None:
    """Check everything, train, and leave the last weights in the run's folder as model.pt."""
    parser, args = parse()
    if args.storage and args.storage.startswith("s3://"):
        check_bucket(parser, args.storage)
    config = {**vars(args), "data": choose_data(parser, args)}
    os.environ.update({name: os.environ.get(name, value) for name, value in LOG.items()})

    import ray
    from pyarrow.fs import copy_files
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init()
    gpus, cpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU"))
    use_gpu = gpus > 0 if args.use_gpu is None else args.use_gpu
    workers = args.num_workers or (gpus if use_gpu else min(2, cpus))
    if not workers or not (use_gpu or cpus):
        parser.error("the cluster has no workers at the moment; --num-workers N --use-gpu waits for them")
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"Result(metrics={result.metrics}, path={result.path!r})")
    assert result.checkpoint
    with result.checkpoint.as_directory() as folder:
        copy_files(str(Path(folder, "model.pt")), f"{result.path}/model.pt", destination_filesystem=result.filesystem)
    print(f"the last weights are in {result.path}/model.pt")


if __name__ == "__main__":
    main()
