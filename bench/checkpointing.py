"""What checkpoints cost an epoch: training stands for them, and is slower while they are stored."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import boto3
import torch

from bench.harness import Bench, BenchmarkError, on_two_workers
from bench.report import Comparison, at_most, spread
from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.tracking.storage import RunStorage
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.trainer import ImageTrainer

EPOCHS = 5
COSTS = ("blocked", "slower", "stored")
MOST_PERCENT = 2.0
BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
# An S3 elsewhere takes nothing from the training; this one is asked to take little: it gets what the workers leave of
# the two cores, and no checksums behind the data, which cost it seconds to take apart.
LITTLE = {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_REQUIRED"}
LEAST_PRIORITY = 19


def measure(bench: Bench) -> list[Comparison]:
    """Train resnet18 with a checkpoint at the beginning and in the middle of each epoch, in an S3 on this machine."""
    bench.log(f"checkpoints: {EPOCHS + 1} epochs of resnet18, two checkpoints in each but the first")
    with moto() as endpoint:
        config = ImageConfig(storage_path=f"s3://{BUCKET}/runs", run_name="bench", epochs=EPOCHS + 1)
        epochs, seen = on_two_workers(_train, config, bench.dataset, endpoint)
        return [compare(epochs, [Seen(*each).cost() for each in seen])]


def compare(epochs: list[float], checkpoints: list[dict[str, float]]) -> Comparison:
    """The share of an epoch that its checkpoint takes.

    Args:
        epochs: The seconds that each epoch trained.
        checkpoints: What was seen of each.
    """
    epoch = statistics.median(epochs)
    percents = [100 * (each["blocked"] + each["slower"]) / epoch for each in checkpoints]
    percent = statistics.median(percents)
    blocked, slower, stored = (statistics.median(each[name] for each in checkpoints) for name in COSTS)
    return Comparison(
        name="One checkpoint, S3 on this machine: share of an epoch, %",
        reference=f"{epoch:.1f} s an epoch",
        ours=f"{spread(percents)} %",
        n=len(checkpoints),
        note=(
            f"training stands {1000 * blocked:.0f} ms to copy the state, and is {slower:.2f} s slower in the steps of "
            f"the {stored:.1f} s in which it is stored; the S3, moto, runs on the same two cores, after the training"
        ),
        data={"epochs": epochs, "checkpoints": checkpoints},
        ratio=percent,
        target=at_most(percent, MOST_PERCENT, " %"),
    )


def _train(config: ImageConfig, dataset: Dataset, endpoint: str) -> tuple[list[float], list[tuple[Any, ...]]]:
    """On each worker; the seconds of each epoch, and what rank 0 saw of each checkpoint, a Seen as a tuple."""
    os.environ.update({**CREDENTIALS, **LITTLE, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
    trainer = ImageTrainer(config, dataset, torch.device("cpu"))
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    epochs: list[float] = []
    seen: list[Seen] = []
    with CheckpointManager(trainer, storage, config, score="test_accuracy") as checkpoints:
        checkpoints.resume()
        trainer.run_epoch()

        def save() -> None:
            began = time.perf_counter()
            checkpoints.save()
            seen.append(Seen(time.perf_counter() - began, [time.perf_counter()], [True]))

        def on_step(step: int, steps: int) -> None:
            seen[-1].moments.append(time.perf_counter())
            seen[-1].storing.append(checkpoints.save_in_progress)
            if step == steps // 2:
                save()

        for _ in range(EPOCHS):
            save()
            epochs.append(trainer.run_epoch(on_step)["train_seconds"])
    return epochs, [astuple(each) for each in seen]


@dataclass(frozen=True)
class Seen:
    """What was seen of a checkpoint: how long training blocked for it, and the steps made since.

    Attributes:
        blocked: In seconds.
        moments: When the first step began and when each ended.
        storing: Whether the checkpoint was being stored, at each of these moments.
    """

    blocked: float
    moments: list[float]
    storing: list[bool]

    def cost(self) -> dict[str, float]:
        """The seconds that training blocked, was slower for the storing, and that this took."""
        steps = [after - before for before, after in pairwise(self.moments)]
        beside = [step for step, busy in zip(steps, self.storing, strict=False) if busy]
        alone = steps[len(beside) :]
        if not alone:
            raise BenchmarkError(
                "storing a checkpoint takes longer than half an epoch: nothing is left to compare with"
            )
        slower = sum(beside) - statistics.mean(alone) * len(beside)
        return dict(zip(COSTS, (self.blocked, slower, sum(beside)), strict=True))


@contextmanager
def moto() -> Generator[str]:
    """An S3 in a process of its own, with a bucket; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.setpriority(os.PRIO_PROCESS, server.pid, LEAST_PRIORITY)
    try:
        _wait_for(port)
        endpoint = f"http://127.0.0.1:{port}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise TimeoutError("moto does not answer")
