"""Weak scaling: samples per second of one worker and of two, each with one thread and the same batch size."""

from __future__ import annotations

from bench import harness
from bench.harness import Bench
from bench.report import Comparison, at_least, spread

STEPS = 12
REPEATS = 3
TARGET = 0.9
BATCH_SIZES = (128, 256)
FLAGS = ("--dataset", "synthetic", "--epochs", "1", "--gradient-dtype", "bf16")


def measure(bench: Bench) -> list[Comparison]:
    """Measure small and large batches: the all-reduce takes the same time for both."""
    return [_measure(bench, batch_size) for batch_size in BATCH_SIZES]


def _measure(bench: Bench, batch_size: int) -> Comparison:
    rates: dict[int, list[float]] = {1: [], 2: []}
    waits = []
    for repeat in range(REPEATS):
        bench.log(f"scaling: {batch_size} images per worker, {repeat + 1} of {REPEATS}")
        for workers in rates:
            size = ("--batch-size", str(batch_size), "--samples", str(STEPS * workers * batch_size))
            run = harness.train(bench, *FLAGS, *size, launcher=harness.torchrun(workers))
            [metrics] = run.history
            rates[workers].append(workers * batch_size / metrics["step_seconds_median"])
            waits.append(metrics["exposed_comm_fraction"])
    return compare(batch_size, rates[1], rates[2], max(waits))


def compare(batch_size: int, one_worker: list[float], two_workers: list[float], wait: float) -> Comparison:
    """Compare two workers' samples per second with twice one worker's, each the best of its repeats.

    Args:
        batch_size: Images per worker and step.
        one_worker: Samples per second of each repeat.
        two_workers: The same for two workers.
        wait: The largest fraction of the time that the workers waited for each other.
    """
    ratio = max(two_workers) / (2 * max(one_worker))
    return Comparison(
        name=f"weak scaling, 1 to 2 workers, {batch_size} images each",
        reference=f"one: {spread(one_worker)} images/s",
        ours=f"two: {spread(two_workers)} images/s",
        ratio=ratio,
        target=at_least(ratio, TARGET),
        n=len(one_worker),
        note="resnet18, by the median step, gradients in bf16 over gloo, under torchrun; the ratio is that of the best "
        "repeats, because other work on the machine only slows them down. Two workers waited for each other at most "
        f"{wait:.0%} of the time. The all-reduce takes the same time for small and large batches, and its threads "
        "share the two cores with the computation. Tried for small batches: buckets of 5 and 100 MB, no difference",
        data={"one": one_worker, "two": two_workers},
    )
