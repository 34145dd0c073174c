"""Speed of a large file to and from S3: ours, `aws s3 cp`, and the engine of both it and boto3, s3transfer."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3

from bench.checkpointer import BUCKET, CREDENTIALS, moto
from bench.harness import Bench, BenchmarkError
from bench.report import Comparison, at_least, spread
from ray_on_ecs.storage.filesystem import copy_to_disk, files_by_name, open_filesystem, upload

ROUNDS = 5
SIZE = 256 * 2**20
OURS, CLI, BOTO3 = "ours", "aws s3 cp", "boto3"
UP, DOWN = "upload", "download"
LEAST = 0.8


def measure(bench: Bench) -> list[Comparison]:
    """Copy a file in both directions in each way, in turn."""
    program = shutil.which("aws")
    others = (CLI, BOTO3) if program else (BOTO3,)
    if program is None:
        bench.log("transfer: aws is not on PATH, so that boto3 stands in (pip install awscli, in another environment)")
    bench.log(f"transfer: {ROUNDS} times {SIZE / 2**20:.0f} MiB in both directions: ours, {', '.join(others)}")
    speeds: dict[str, list[float]] = {}
    with moto() as endpoint, tempfile.TemporaryDirectory() as name:
        os.environ.update({**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
        ways = _ways(Path(name), program)
        for _ in range(ROUNDS + 1):
            for way, copy in ways.items():
                began = time.perf_counter()
                copy()
                speeds.setdefault(way, []).append(SIZE / 2**20 / (time.perf_counter() - began))
        for way in (OURS, *others):
            copied = Path(name, f"from {way}").read_bytes()
            if copied != Path(name, "up", "file").read_bytes():
                raise BenchmarkError(f"{way} has copied other bytes")
    return [_compare(direction, other, speeds) for direction in (UP, DOWN) for other in others]


def _ways(folder: Path, program: str | None) -> dict[str, Callable[[], object]]:
    """Return what copies the file, by the direction and the way."""
    source = folder / "up" / "file"
    source.parent.mkdir()
    source.write_bytes(os.urandom(SIZE))
    client = boto3.client("s3")
    address = f"s3://{BUCKET}/{OURS}"

    def run(*arguments: str) -> None:
        subprocess.run(["aws", "s3", "cp", "--only-show-errors", *arguments], check=True)

    def down() -> None:
        store, path = open_filesystem(f"{address}/file")
        copy_to_disk(store, {folder / f"from {OURS}": files_by_name(store, path)["file"]})

    ways: dict[str, Callable[[], object]] = {
        f"{UP} {OURS}": lambda: upload(source.parent, address),
        f"{UP} {BOTO3}": lambda: client.upload_file(str(source), BUCKET, BOTO3),
        f"{DOWN} {OURS}": down,
        f"{DOWN} {BOTO3}": lambda: client.download_file(BUCKET, BOTO3, str(folder / f"from {BOTO3}")),
    }
    if program:
        ways[f"{UP} {CLI}"] = lambda: run(str(source), f"s3://{BUCKET}/cli")
        ways[f"{DOWN} {CLI}"] = lambda: run(f"s3://{BUCKET}/cli", str(folder / f"from {CLI}"))
    return ways


def _compare(direction: str, other: str, speeds: dict[str, list[float]]) -> Comparison:
    ours, theirs = speeds[f"{direction} {OURS}"][1:], speeds[f"{direction} {other}"][1:]  # the first has imports
    ratio = sorted(mine / their for mine, their in zip(ours, theirs, strict=True))[len(ours) // 2]
    return Comparison(
        name=f"{direction.capitalize()} of {SIZE / 2**20:.0f} MiB, of the speed of {other}",
        reference=f"{spread(theirs)} MiB/s",
        ours=f"{spread(ours)} MiB/s",
        n=len(ours),
        note="moto on the same machine" + ("; aws s3 cp with the start of its process" if other == CLI else ""),
        data={OURS: ours, other: theirs},
        ratio=ratio,
        target=at_least(ratio, LEAST),
    )
