"""Gradients on the wire in bf16 beside fp32: bytes of a step, and the accuracy at the end."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import psutil
import torch
import torch.distributed as dist
from torch import nn

from bench import harness, time_to_accuracy
from bench.harness import Bench, Run
from bench.report import Comparison, at_most
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.datasets import load
from training.recipes.images.trainer import ImageTrainer

STEPS = 12
DTYPES = ("fp32", "bf16")
SEEDS_OF_SMALL = 20
SMALL = ImageConfig(dataset="synthetic", samples=2 * 8 * STEPS, batch_size=8, epochs=1)
TRAFFIC_TARGET = 0.51
POINTS = 0.3


def measure(bench: Bench, fp32: list[Run]) -> list[Comparison]:
    """The bytes of both, and trainings in bf16 beside those in fp32 that are there already."""
    bench.log("gradient traffic: bytes of a step")
    bytes_of = {dtype: bytes_a_step(dtype) for dtype in DTYPES}
    bf16 = []
    for seed in bench.seeds:
        bench.log(f"gradient traffic: training with bf16 gradients, seed {seed}")
        bf16.append(harness.train(bench, *time_to_accuracy.FLAGS, "--seed", str(seed), "--gradient-dtype", "bf16"))
    bench.log(f"gradient traffic: a small network, {SEEDS_OF_SMALL} seeds of each")
    small = accuracies(bench)
    return [
        traffic(bytes_of),
        accuracy("resnet18", [run.accuracy for run in fp32], [run.accuracy for run in bf16]),
        accuracy("a small network", small["fp32"], small["bf16"]),
    ]


def traffic(bytes_of: dict[str, float]) -> Comparison:
    """Bytes on the wire."""
    ratio = bytes_of["bf16"] / bytes_of["fp32"]
    return Comparison(
        name="bytes on the wire a step",
        reference=f"fp32: {bytes_of['fp32'] / 1e6:.1f} MB",
        ours=f"bf16: {bytes_of['bf16'] / 1e6:.1f} MB",
        ratio=ratio,
        target=at_most(ratio, TRAFFIC_TARGET),
        n=STEPS,
        note="sent by both workers of a resnet18, as the loopback interface counts it, TCP and all",
        data=bytes_of,
    )


def accuracy(network: str, fp32: list[float], bf16: list[float]) -> Comparison:
    """Points of accuracy lost, seed by seed."""
    lost = [100 * (one - other) for one, other in zip(fp32, bf16, strict=True)]
    error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
    return Comparison(
        name=f"accuracy with bf16 gradients, {network}",
        reference=f"fp32: {statistics.mean(fp32):.4f}",
        ours=f"bf16: {statistics.mean(bf16):.4f}",
        ratio=statistics.mean(lost),
        target=at_most(statistics.mean(lost), POINTS, " points lost"),
        n=len(lost),
        note=f"the ratio is points lost on average, with a standard error of {error:.2f}; seed by seed "
        + ", ".join(f"{each:+.2f}" for each in lost),
        data={"fp32": fp32, "bf16": bf16},
    )


def bytes_a_step(dtype: str) -> float:
    """Bytes that two workers of a resnet18 send each other in a step, counted by the system on its loopback."""
    return harness.on_two_workers(_send, dtype)


def _send(dtype: str) -> float:
    """On each of the two workers: the bytes of an epoch's steps between its first step's end and its last's."""
    config = replace(SMALL, gradient_dtype=dtype)
    trainer = ImageTrainer(config, load(config.dataset, config), torch.device("cpu"))
    counts: list[int] = []

    def count(step: int, steps: int) -> None:
        dist.barrier()
        counts.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
        dist.barrier()

    trainer.run_epoch(count)
    return (counts[-1] - counts[0]) / (len(counts) - 1)


def accuracies(bench: Bench) -> dict[str, list[float]]:
    """Final test accuracies of a network that is small enough for many seeds: one training tells little.

    Seed by seed two trainings differ by chance as soon as anything is rounded differently.
    """
    return harness.on_two_workers(_train_small, bench.dataset)


def small(channels: int, classes: int) -> nn.Module:
    """Three convolutions."""
    widths = (channels, 32, 64, 128)
    layers = [
        nn.Sequential(nn.Conv2d(one, other, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(other), nn.ReLU())
        for one, other in pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def _train_small(dataset: Dataset) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for seed in range(SEEDS_OF_SMALL):
        for dtype in DTYPES:
            config = ImageConfig(
                model="bench.gradient_traffic:small", epochs=3, seed=seed, gradient_dtype=dtype, static_graph="on"
            )
            trainer = ImageTrainer(config, dataset, torch.device("cpu"))
            found[dtype].append([trainer.run_epoch() for _ in range(config.epochs)][-1]["test_accuracy"])
    return found
