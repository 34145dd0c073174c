"""Weak scaling: samples a second of one worker and of two, each of one thread and with as many images a step."""

from __future__ import annotations

from bench import runs
from bench.report import Finding, at_least, spread
from bench.runs import Bench

STEPS = 12
REPEATS = 3
TARGET = 0.9
FLAGS = ("--dataset", "synthetic", "--epochs", "1", "--gradient-dtype", "bf16")


def measure(bench: Bench) -> list[Finding]:
    """For small and large batches: the exchange of gradients takes as long for both."""
    return [_measure(bench, batch_size) for batch_size in (128, 256)]


def _measure(bench: Bench, batch_size: int) -> Finding:
    rates: dict[int, list[float]] = {1: [], 2: []}
    waits = []
    for repeat in range(REPEATS):
        bench.say(f"scaling: {batch_size} images a worker, {repeat + 1} of {REPEATS}")
        for workers in (1, 2):
            size = ("--batch-size", str(batch_size), "--samples", str(STEPS * workers * batch_size))
            run = runs.train(bench, *FLAGS, *size, launcher=runs.torchrun(workers))
            [metrics] = run.history
            rates[workers].append(workers * batch_size / metrics["step_seconds_median"])
            waits.append(metrics["exposed_comm_fraction"])
    return finding(batch_size, rates[1], rates[2], max(waits))


def finding(batch_size: int, one: list[float], two: list[float], wait: float) -> Finding:
    """Two workers' samples a second, as a share of twice one worker's; each is the best of its repeats."""
    return Finding(
        name=f"weak scaling, 1 to 2 workers, {batch_size} images each",
        reference=f"one: {spread(one)} images/s",
        ours=f"two: {spread(two)} images/s",
        **at_least(max(two) / (2 * max(one)), TARGET),
        n=len(one),
        note="resnet18, by the median step, gradients in bf16 over gloo, under torchrun; the ratio is of the best "
        "repeats, as whatever else the machine does only slows them. Two workers waited for each other at most "
        f"{wait:.0%} of the time; the exchange takes as long for small batches as for large, and its threads take it "
        "from the two cores that compute. Tried for small ones: buckets of 5 and 100 MB, no difference",
        data={"one": one, "two": two},
    )
