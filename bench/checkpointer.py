"""The time for which a checkpoint blocks the loop: Checkpointer, and torch.save."""

from __future__ import annotations

import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import boto3
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from bench.harness import Bench, on_two_workers
from bench.report import Comparison, at_most, spread
from ray_on_ecs import Checkpointer
from ray_on_ecs.node.ports import free_ports
from ray_on_ecs.storage.run_storage import RunStorage
from tests.waiting import until

ROUNDS = 7
OURS, TO_DISK, TO_BUCKET = "Checkpointer", "torch.save to a disk", "torch.save to S3"
BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
# An S3 elsewhere takes nothing from the training; this one is asked to take little: it gets what the workers leave of
# the two cores, and no checksums behind the data, which cost it seconds to take apart.
LITTLE = {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_REQUIRED"}
LEAST_PRIORITY = 19
START_SECONDS = 60.0


def measure(bench: Bench) -> list[Comparison]:
    """Save resnet18 under DDP on two ranks in each way, in turn."""
    bench.log(f"checkpointer: {ROUNDS} checkpoints of resnet18 in three ways, on two ranks")
    with moto() as endpoint:
        seconds = on_two_workers(_save, endpoint)
    return [compare(other, seconds) for other in (TO_DISK, TO_BUCKET)]


def compare(other: str, seconds: dict[str, list[float]]) -> Comparison:
    """Compare the times for which the loop was blocked, round by round."""
    ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[other], strict=True)]
    ratio = statistics.median(ratios)
    return Comparison(
        name=f"A checkpoint's blocked time, of that of {other}",
        reference=f"{spread([1000 * blocked for blocked in seconds[other]])} ms",
        ours=f"{spread([1000 * blocked for blocked in seconds[OURS]])} ms",
        n=len(ratios),
        note="resnet18 and AdamW (134 MB), DDP on two ranks; Checkpointer stores it in the background",
        data={OURS: seconds[OURS], other: seconds[other]},
        ratio=ratio,
        target=at_most(ratio, 1.0),
    )


def _save(endpoint: str) -> dict[str, list[float]]:
    """On each rank; the seconds that the loop was blocked, by the way to save."""
    os.environ.update({**CREDENTIALS, **LITTLE, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
    torch.manual_seed(0)
    network = resnet18(num_classes=10)
    network.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
    model = DistributedDataParallel(network, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    bucket = RunStorage.open(f"s3://{BUCKET}/runs", "torch")
    checkpoint = Checkpointer(f"s3://{BUCKET}/runs/ours", model=model, optimizer=optimizer)
    images = torch.randn(8, 1, 28, 28)
    labels = torch.zeros(8, dtype=torch.int64)

    def step() -> None:
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, object]:
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}

    def to_disk() -> None:
        if dist.get_rank() == 0:
            torch.save(state(), Path(folder, "checkpoint.pt"))
        dist.barrier()

    def to_bucket() -> None:
        if dist.get_rank() == 0:
            content = io.BytesIO()
            torch.save(state(), content)
            bucket.write("checkpoint.pt", content.getvalue())
        dist.barrier()

    seconds: dict[str, list[float]] = {}
    ways = {OURS: checkpoint.save, TO_DISK: to_disk, TO_BUCKET: to_bucket}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS + 1):
            for name, save in ways.items():
                step()
                checkpoint.step += 1
                dist.barrier()
                began = time.perf_counter()
                save()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                checkpoint.wait()
    checkpoint.close()
    return {name: rounds[1:] for name, rounds in seconds.items()}  # the first round includes imports


@contextmanager
def moto() -> Generator[str]:
    """Start an S3 server in a separate process, make a bucket, and yield the server's address."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.setpriority(os.PRIO_PROCESS, server.pid, LEAST_PRIORITY)
    try:
        until(lambda: _answers(port), START_SECONDS)
        endpoint = f"http://127.0.0.1:{port}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
