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
from itertools import pairwise

import boto3
import torch

from bench.report import Finding, at_most, spread
from bench.runs import Bench, on_two_workers
from training.config import TrainingConfig
from training.data import Dataset
from training.keeper import Keeper
from training.loop import Replica
from training.storage import RunStorage

CHECKPOINTS = 3
MOST_PERCENT = 2.0
BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
# An S3 elsewhere takes nothing from the training; this one is asked to take little: it gets what the workers leave of
# the two cores, and no checksums behind the data, which cost it seconds to take apart.
LITTLE = {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_REQUIRED"}
LEAST_PRIORITY = 19


def measure(bench: Bench) -> list[Finding]:
    """Train resnet18 with a checkpoint after each epoch, stored in an S3 on this machine."""
    bench.say(f"checkpoints: {CHECKPOINTS + 1} epochs of resnet18, a checkpoint after each")
    with moto() as endpoint:
        config = TrainingConfig(storage_path=f"s3://{BUCKET}/runs", run_name="bench", epochs=CHECKPOINTS + 1)
        return [finding(on_two_workers(_train, config, bench.dataset, endpoint))]


def finding(epochs: list[dict[str, float]]) -> Finding:
    """The share of an epoch that its checkpoint takes."""
    shares = [100 * (each["stood"] + each["slower"]) / each["seconds"] for each in epochs]
    stood, slower = (statistics.median(each[name] for each in epochs) for name in ("stood", "slower"))
    stored = statistics.median(each["stored"] for each in epochs)
    return Finding(
        name="Checkpoint after each epoch, S3 on this machine: share of the epoch, %",
        reference=f"{statistics.median(each['seconds'] for each in epochs):.1f} s an epoch",
        ours=f"{spread(shares)} %",
        n=len(epochs),
        note=(
            f"training stands {1000 * stood:.0f} ms to copy the state, and is {slower:.2f} s slower in the steps of "
            f"the {stored:.1f} s in which it is stored; the S3, moto, runs on the same two cores, after the training"
        ),
        data={"epochs": epochs},
        **at_most(statistics.median(shares), MOST_PERCENT, " %"),
    )


def _train(config: TrainingConfig, dataset: Dataset, endpoint: str) -> list[dict[str, float]]:
    """On each worker; what rank 0 saw of each epoch that began with a checkpoint on its way."""
    os.environ.update({**CREDENTIALS, **LITTLE, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
    replica = Replica(config, dataset, torch.device("cpu"))
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    seen: list[dict[str, float]] = []
    with Keeper(replica, storage, config) as keeper:
        keeper.resume()
        replica.run_epoch()
        for _ in range(CHECKPOINTS):
            began = time.perf_counter()
            keeper.save()
            saved = time.perf_counter()
            moments, storing = [saved], [True]

            def on_step(step: int, steps: int, moments: list[float] = moments, storing: list[bool] = storing) -> None:
                moments.append(time.perf_counter())
                storing.append(keeper.storing)

            replica.run_epoch(on_step)
            seen.append(_seen(saved - began, moments, storing))
    return seen


def _seen(stood: float, moments: list[float], storing: list[bool]) -> dict[str, float]:
    """An epoch with the steps of its beginning, which ran beside the storing, held against the others' median."""
    steps = [after - before for before, after in pairwise(moments)]
    beside = [step for step, busy in zip(steps, storing, strict=False) if busy]
    usual = statistics.median(steps[len(beside) :] or steps)
    return {
        "seconds": moments[-1] - moments[0] + stood,
        "stood": stood,
        "stored": sum(beside),
        "slower": sum(beside) - usual * len(beside),
    }


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
