"""Gradients on the wire in bf16 beside fp32: bytes of a step, and the accuracy at the end."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import psutil
import torch
import torch.distributed as dist
from torch import nn

from bench import goal, runs
from bench.report import Finding, at_most
from bench.runs import Bench, Run
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.datasets import load
from training.recipes.images.trainer import ImageTrainer

STEPS = 12
DTYPES = ("fp32", "bf16")
SEEDS_OF_SMALL = 20
SMALL = ImageConfig(dataset="synthetic", samples=2 * 8 * STEPS, batch_size=8, norm_batch=0, epochs=1)
POINTS = 0.3


def measure(bench: Bench, fp32: list[Run]) -> list[Finding]:
    """The bytes of both, and trainings in bf16 beside those in fp32 that are there already."""
    bench.say("wire: bytes of a step")
    bytes_of = {dtype: bytes_a_step(dtype) for dtype in DTYPES}
    bf16 = []
    for seed in bench.seeds:
        bench.say(f"wire: training with bf16 gradients, seed {seed}")
        bf16.append(runs.train(bench, *goal.OURS, "--seed", str(seed), "--gradient-dtype", "bf16"))
    bench.say(f"wire: a small network, {SEEDS_OF_SMALL} seeds of each")
    small = accuracies(bench)
    return [
        traffic(bytes_of),
        accuracy("resnet18", [run.accuracy for run in fp32], [run.accuracy for run in bf16]),
        accuracy("a small network", small["fp32"], small["bf16"]),
    ]


def traffic(bytes_of: dict[str, float]) -> Finding:
    """Bytes on the wire."""
    return Finding(
        name="bytes on the wire a step",
        reference=f"fp32: {bytes_of['fp32'] / 1e6:.1f} MB",
        ours=f"bf16: {bytes_of['bf16'] / 1e6:.1f} MB",
        **at_most(bytes_of["bf16"] / bytes_of["fp32"], 0.51),
        n=STEPS,
        note="sent by both workers of a resnet18, as the loopback interface counts it, TCP and all",
        data=bytes_of,
    )


def accuracy(network: str, fp32: list[float], bf16: list[float]) -> Finding:
    """Points of accuracy lost, seed by seed."""
    lost = [100 * (one - other) for one, other in zip(fp32, bf16, strict=True)]
    error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
    return Finding(
        name=f"accuracy with bf16 gradients, {network}",
        reference=f"fp32: {statistics.mean(fp32):.4f}",
        ours=f"bf16: {statistics.mean(bf16):.4f}",
        **at_most(statistics.mean(lost), POINTS, " points lost"),
        n=len(lost),
        note=f"the ratio is points lost on average, with a standard error of {error:.2f}; seed by seed "
        + ", ".join(f"{each:+.2f}" for each in lost),
        data={"fp32": fp32, "bf16": bf16},
    )


def bytes_a_step(dtype: str) -> float:
    """Bytes that two workers of a resnet18 send each other in a step, counted by the system on its loopback."""
    return runs.on_two_workers(_send, dtype)


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
    return runs.on_two_workers(_train_small, bench.dataset)


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
            config = ImageConfig(model="bench.wire:small", epochs=3, seed=seed, gradient_dtype=dtype, static_graph="on")
            trainer = ImageTrainer(config, dataset, torch.device("cpu"))
            found[dtype].append([trainer.run_epoch() for _ in range(config.epochs)][-1]["test_accuracy"])
    return found
