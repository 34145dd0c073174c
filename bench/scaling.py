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
    return [_measure(bench, batch_size, wanted) for batch_size, wanted in ((128, None), (256, TARGET))]


def _measure(bench: Bench, batch_size: int, wanted: float | None) -> Finding:
    rates: dict[int, list[float]] = {1: [], 2: []}
    waits = []
    for repeat in range(REPEATS):
        bench.say(f"scaling: {batch_size} images a worker, {repeat + 1} of {REPEATS}")
        for workers in (1, 2):
            size = ("--batch-size", str(batch_size), "--samples", str(STEPS * workers * batch_size))
            run = runs.train(bench, *FLAGS, *size, launcher=runs.torchrun(workers))
            [metrics] = run.history
            rates[workers].append(workers * batch_size / metrics["step_seconds_median"])
            waits.append(metrics["network_wait_share"])
    return finding(batch_size, rates[1], rates[2], wanted, max(waits))


def finding(batch_size: int, one: list[float], two: list[float], wanted: float | None, wait: float) -> Finding:
    """Two workers' samples a second, as a share of twice one worker's; each is the best of its repeats."""
    ratio = max(two) / (2 * max(one))
    fields = at_least(ratio, wanted) if wanted else {"ratio": ratio}
    return Finding(
        name=f"weak scaling, 1 to 2 workers, {batch_size} images each",
        reference=f"one: {spread(one)} images/s",
        ours=f"two: {spread(two)} images/s",
        **fields,
        n=len(one),
        note="resnet18, gradients in bf16 over gloo, under torchrun; of each the best repeat, as whatever else the "
        f"machine does only slows them. Two workers waited for each other at most {wait:.0%} of the time",
        data={"one": one, "two": two},
    )
