"""An image classifier in plain PyTorch: resnet18 on Fashion-MNIST, or a pretrained model on your photographs.

    ray-on-ecs run image_classifier.py --epochs 5
    ray-on-ecs run image_classifier.py --data s3://my-bucket/flowers --model resnet50 --weights DEFAULT
    torchrun --nproc-per-node 2 image_classifier.py --data ./flowers

Copy it (ray-on-ecs recipe copy image_classifier) and change it. A training step always has the same micro-batches,
which the workers share, so the number of workers does not change the learning curve.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ray_on_ecs import Checkpointer, DistributedSampler, progress
from ray_on_ecs.recipes.batch_norm import BatchNorms
from ray_on_ecs.recipes.image_batches import Images, MicroBatches
from ray_on_ecs.recipes.image_models import build_model, check_model, load_weights
from ray_on_ecs.recipes.images import BUILT_IN, SIDE, load_images
from ray_on_ecs.recipes.options import Options, fail, number, source, whole
from ray_on_ecs.recipes.ranks import EpochMeans, Ranks, end_ranks, largest_world_size, start_ranks

# ---- Options


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = Options(__doc__)
    add = parser.add_argument
    add("--data", type=source(*BUILT_IN), default="auto", metavar="NAME|FOLDER",
        help="fashion-mnist or digits; a folder or s3://bucket/prefix with train/CLASS/... and test/CLASS/..., or with "
        "FashionMNIST/raw/; auto (the default): fashion-mnist if it can be downloaded, or else digits")  # fmt: skip
    add("--model", default="resnet18", help="one of torchvision's, or module:function of (channels, classes)")
    add("--weights", default="none", metavar="DEFAULT|FILE",
        help="pretrained: DEFAULT or another name of torchvision's weights; a file, folder or s3://bucket/key with the "
        "state dict; none (the default): random weights")  # fmt: skip
    add("--epochs", type=whole(), help="by default at least 4, and as many as 400 steps take, or 200 with --weights")
    add(
        "--batch-size", type=whole(), help="images of a micro-batch (on GPUs 512, or 128 photographs; on CPUs 64 or 32)"
    )
    add("--max-workers", type=whole(), help="micro-batches of a step, which the workers share (default: the workers)")
    add("--lr", type=number(above=0), help="peak learning rate for 256 images a step (3e-3, or 1e-3 with --weights)")
    add("--weight-decay", type=number(), default=0.05, help="of all weights but biases and norms (%(default)s)")
    add("--image-size", type=whole(), default=224, help="side of a folder's photographs, in pixels (%(default)s)")
    add("--flip", action=argparse.BooleanOptionalAction, help="flip half of the training images (of digits: no)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs that have it")
    add("--compile", action="store_true", help="compile the model, which takes a minute")
    add("--samples", type=whole(), help="train on N of the images only")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of weights, order and augmentation (%(default)s)")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Train, test after each epoch, and export the last and the best weights."""
    # ---- Data
    ranks = start_ranks()
    rank, world_size, device = ranks
    torch.backends.cudnn.benchmark = True  # all batches have one size
    data = load_images(args.data, args.image_size)  # or an ImagesInMemory of yours
    if args.samples:
        data.limit(args.samples)
    resolve_defaults(args, data, ranks)
    sampler = DistributedSampler(data, seed=args.seed)
    micro_batches = MicroBatches(sampler, len(data), args.batch_size, args.max_workers)

    # ---- Model
    torch.manual_seed(args.seed)  # the same weights on all ranks
    # For a model of yours add a function here, and pass --model image_classifier:NAME: exported weights have the name.
    network = build_model(args.model, data.shape[0], len(data.class_names)).to(device)
    if args.weights != "none":
        data.mean, data.std = load_weights(network, args.model, args.weights) or (data.mean, data.std)
    check_model(args.model, network, data.shape, len(data.class_names))
    if device.type == "cuda" or data.shape[0] > 1:  # faster, but on CPUs not for images of one channel
        network = network.to(memory_format=torch.channels_last)
    torch.manual_seed(args.seed * 1_000_003 + rank)  # dropout differs
    norms = BatchNorms(network, micro_batches.per_rank)
    model: Any = network
    if world_size > 1:  # the ranks' running statistics are averaged before a test, not before each forward pass
        model = DistributedDataParallel(network, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if args.compile:
        model.compile()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

    # ---- Optimizer and schedule: biases and norms, which are vectors, don't decay
    groups = [
        {"params": [each for each in network.parameters() if each.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [each for each in network.parameters() if each.dim() <= 1], "weight_decay": 0.0},
    ]
    peak = args.lr * math.sqrt(micro_batches.images / 256)  # https://arxiv.org/abs/2205.10287
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=True)
    total_steps = args.epochs * micro_batches.steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=total_steps, pct_start=0.15, cycle_momentum=False
    )

    # ---- Checkpoint: the same settings resume, compiled or not and in any precision
    trained = EpochMeans(device, "loss", "accuracy")
    settings = {name: value for name, value in vars(args).items() if name not in ("compile", "precision")}
    checkpoint = Checkpointer(
        model=model,
        optimizer=optimizer,
        state={"schedule": schedule, "sampler": sampler, "trained": trained},
        keep_best="test_accuracy",
        best_mode="max",
        config={**settings, "data": data.name, "images": len(data)},
    )
    checkpoint.resume()
    if rank == 0:
        steps = f"{args.epochs} x {micro_batches.steps} steps of {micro_batches.images} images"
        done = f", {checkpoint.epoch} epochs done" if checkpoint.epoch else ""
        print(f"{args.model} on {data.name}: {steps}, {world_size} x {device.type.upper()}{done}", flush=True)

    # ---- Training
    while checkpoint.epoch < args.epochs and not checkpoint.should_stop:
        began, first_step = time.perf_counter(), checkpoint.step
        model.train()
        batches = data.train_batches(micro_batches, device, seed=args.seed, flip=args.flip)
        for count, (images, labels) in enumerate(batches, start=1):
            is_last = count % micro_batches.per_rank == 0  # of the step
            norms.before_forward()
            with nullcontext() if is_last or world_size == 1 else model.no_sync():
                with autocast:
                    logits = model(images).float()
                    loss = cross_entropy(logits, labels)
                # A step's gradient is the mean over its micro-batches; DDP takes the mean over the ranks.
                (loss * (world_size / args.max_workers)).backward()
            trained.add(len(labels), loss=loss, accuracy=(logits.argmax(1) == labels).double().mean())
            if not is_last:
                continue
            norms.after_step()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if checkpoint.after_step(samples=micro_batches.images, loss=loss):
                break  # the node is being reclaimed, and the state is saved
            progress(checkpoint.step, total_steps)
        else:
            # ---- Test
            norms.average_over_ranks(args.max_workers)
            speed = (checkpoint.step - first_step) * micro_batches.images / (time.perf_counter() - began)
            tested = EpochMeans(device, "loss", "accuracy")
            network.eval()
            with torch.no_grad(), autocast:
                for images, labels in data.test_batches(args.batch_size, ranks):
                    logits = network(images).float()
                    accuracy = (logits.argmax(1) == labels).double().mean()
                    tested.add(len(labels), loss=cross_entropy(logits, labels), accuracy=accuracy)
            metrics = {**trained.end("train_"), **tested.end("test_"), "samples_per_second": speed}
            metrics["seconds"] = time.perf_counter() - began
            if rank == 0:
                line = "  ".join(f"{name.replace('_', ' ')} {value:<6.4g}" for name, value in metrics.items())
                print(f"epoch {checkpoint.epoch + 1}/{args.epochs}  {line}", flush=True)
            if not math.isfinite(metrics["train_loss"] + metrics["test_loss"]):
                fail(f"the loss of epoch {checkpoint.epoch + 1} is not finite; lower --lr, now {args.lr}")
            checkpoint.end_epoch(**metrics)

    # ---- Export: the header has the description that the weights need
    if not checkpoint.should_stop:
        about = {"model": args.model, "classes": data.class_names, "shape": data.shape}
        about |= {"mean": data.mean, "std": data.std}
        metadata = {"image_classifier": json.dumps(about)}
        checkpoint.export("model.safetensors", metadata)
        if checkpoint.load_best():
            checkpoint.export("best.safetensors", metadata)
    checkpoint.close()
    end_ranks()


# ---- Defaults


def resolve_defaults(args: argparse.Namespace, data: Images, ranks: Ranks) -> None:
    """Set the defaults that depend on data, device and workers."""
    is_gpu, is_pretrained, total = ranks.device.type == "cuda", args.weights != "none", len(data)
    args.max_workers = args.max_workers or largest_world_size()
    if args.max_workers < ranks.world_size:
        fail(f"argument --max-workers: {args.max_workers} is less than the {ranks.world_size} workers")
    largest = (512 if is_gpu else 64) if data.shape[-1] <= 2 * SIDE else (128 if is_gpu else 32)
    # A small data set has smaller batches, of which an epoch has at least eight.
    args.batch_size = args.batch_size or max(2, min(largest, total // (8 * args.max_workers)))
    steps = total // (args.batch_size * args.max_workers)
    if not steps:
        fail(f"argument --batch-size: {args.batch_size} on each of {args.max_workers} workers is more than the {total} "
             f"training images; use {total // args.max_workers} or less, or fewer workers")  # fmt: skip
    args.epochs = args.epochs or max(4, math.ceil((200 if is_pretrained else 400) / steps))
    args.lr = args.lr or (1e-3 if is_pretrained else 3e-3)
    args.flip = data.can_flip if args.flip is None else args.flip
    if args.precision == "auto":
        args.precision = "bf16" if is_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


if __name__ == "__main__":
    main(parse())
