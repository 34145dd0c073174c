"""What each choice of the step earns: its time with it and without it, all else as by default, in turns."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from bench import harness
from bench.harness import Bench
from bench.report import Comparison, spread
from ray_on_ecs.errors import UsageError
from training.recipes.images.config import ImageConfig
from training.recipes.images.datasets import load
from training.recipes.images.trainer import ImageTrainer

BATCH_SIZE = 128
CONFIG = ImageConfig(dataset="synthetic", samples=6 * BATCH_SIZE, batch_size=BATCH_SIZE, epochs=3)

# The setting, the value to compare with, and the choice.
ONE_WORKER: tuple[tuple[str, Any, Any], ...] = (
    ("channels_last", "off", "on"),
    ("precision", "fp32", "bf16"),
    ("fused_optimizer", "off", "on"),
    ("compile", "off", "on"),
    ("horizontal_flip", "off", "on"),
    ("max_shift", 0, 2),
    ("data_on_device", "off", "on"),
)
TWO_WORKERS: tuple[tuple[str, Any, Any], ...] = (
    ("gradient_dtype", "fp32", "bf16"),
    ("bucket_mb", None, 100.0),
    ("static_graph", "off", "on"),
)


def measure(bench: Bench) -> list[Comparison]:
    """Steps of one worker, and of two where the choice is about what they send each other."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    comparisons = []
    for name, without, chosen in ONE_WORKER:
        bench.log(f"choices: {name}")
        try:
            comparisons.append(compare(name, without, chosen, one_worker(name, (without, chosen), device)))
        except UsageError as error:  # a compiler that is not there
            comparisons.append(
                Comparison(name=f"step with {name} {chosen}", reference="-", ours="-", ratio=None, note=str(error))
            )
    for name, without, chosen in TWO_WORKERS:
        bench.log(f"choices: {name}, two workers")
        comparisons.append(compare(name, without, chosen, two_workers(name, (without, chosen))))
    return comparisons


def compare(name: str, without: Any, chosen: Any, seconds: dict[Any, list[float]]) -> Comparison:
    """The step times of both."""
    medians = {value: statistics.median(times) for value, times in seconds.items()}
    default = getattr(ImageConfig(), name)
    return Comparison(
        name=f"step with {name} {chosen}",
        reference=f"{without}: {spread([1000 * t for t in seconds[without]])} ms",
        ours=f"{chosen}: {spread([1000 * t for t in seconds[chosen]])} ms",
        ratio=medians[without] / medians[chosen],
        n=len(seconds[chosen]),
        note=f"the default is {default}",
        data={str(value): times for value, times in seconds.items()},
    )


def one_worker(name: str, values: tuple[Any, Any], device: torch.device) -> dict[Any, list[float]]:
    """Step times of one worker."""
    dataset = replace(load("synthetic", CONFIG), flip_invariant=True)
    return _in_turns({value: ImageTrainer(replace(CONFIG, **{name: value}), dataset, device) for value in values})


def two_workers(name: str, values: tuple[Any, Any]) -> dict[Any, list[float]]:
    """Step times of two workers of one thread each, on this machine's CPUs."""
    return harness.on_two_workers(one_worker, name, values, torch.device("cpu"))


def _in_turns(trainers: dict[Any, ImageTrainer]) -> dict[Any, list[float]]:
    """The median step of each epoch, in seconds, but of the first, which warms up."""
    seconds: dict[Any, list[float]] = {value: [] for value in trainers}
    for _ in range(CONFIG.epochs):
        for value, trainer in trainers.items():
            seconds[value].append(trainer.run_epoch()["step_seconds_median"])
    return {value: times[1:] for value, times in seconds.items()}
