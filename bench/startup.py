"""From the command to the first step: Ray Train's time beside torchrun's, on the same loop."""

from __future__ import annotations

from datetime import datetime

from bench import runs
from bench.report import Finding, spread
from bench.runs import Bench, Run

REPEATS = 3
# A first step of a moment, so that the start is what is measured.
FLAGS = ("--dataset", "synthetic", "--samples", "64", "--batch-size", "8", "--epochs", "1")

NOTE = (
    "two workers; the ratio is of the best. A Ray of one's own starts ten processes that import what they need, in "
    "three stages: driver, Ray Train's controller, workers. Done, from 43 s on two cores of 2.8 GHz: no torchvision in "
    "driver and controller, workers that Ray has started already, without a runtime environment. Tried: imports in the "
    "workers while the controller starts, 5 s more; no dashboard, 3 to 5 s less, but Ray Train asks it for its state"
)


def measure(bench: Bench) -> list[Finding]:
    """Both in turns, two workers each."""
    seconds: dict[str, list[float]] = {"torchrun": [], "ray": []}
    for repeat in range(REPEATS):
        bench.say(f"start: {repeat + 1} of {REPEATS}")
        seconds["torchrun"].append(_until_first_step(runs.train(bench, *FLAGS, launcher=runs.torchrun(2))))
        seconds["ray"].append(_until_first_step(runs.train(bench, *FLAGS, "--num-workers", "2")))
    return [finding(seconds["torchrun"], seconds["ray"])]


def finding(torchrun: list[float], ray: list[float]) -> Finding:
    """How many times torchrun's time Ray Train takes, with a Ray of its own to start; of each the best."""
    return Finding(
        name="from the command to the first step",
        reference=f"torchrun: {spread(torchrun)} s",
        ours=f"Ray Train: {spread(ray)} s",
        ratio=min(ray) / min(torchrun),
        n=len(ray),
        note=NOTE,
        data={"torchrun": torchrun, "ray": ray},
    )


def _until_first_step(run: Run) -> float:
    return datetime.fromisoformat(run.result["times"]["first_step"]).timestamp() - run.started
