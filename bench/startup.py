"""Time from the command to the first step: Ray Train and torchrun, with the same training loop."""

from __future__ import annotations

from datetime import datetime

from bench import harness
from bench.harness import Bench, Run
from bench.report import Comparison, spread

REPEATS = 3
# A first step that takes next to no time.
FLAGS = ("--dataset", "synthetic", "--samples", "64", "--batch-size", "8", "--epochs", "1")

NOTE = (
    "two workers; the ratio is that of the best. A local Ray starts ten processes that import their packages, in three "
    "stages: driver, Ray Train's controller, workers. Done, from 43 s on two cores of 2.8 GHz: no torchvision in "
    "driver and controller, workers that Ray has already started, no runtime environment. Tried: imports in the "
    "workers while the controller starts, 5 s more; no dashboard, 3 to 5 s less, but Ray Train asks it for its state"
)


def measure(bench: Bench) -> list[Comparison]:
    """Start both in turns, with two workers each."""
    seconds: dict[str, list[float]] = {"torchrun": [], "ray": []}
    for repeat in range(REPEATS):
        bench.log(f"startup: {repeat + 1} of {REPEATS}")
        seconds["torchrun"].append(_until_first_step(harness.train(bench, *FLAGS, launcher=harness.torchrun(2))))
        seconds["ray"].append(_until_first_step(harness.train(bench, *FLAGS, "--num-workers", "2")))
    return [compare(seconds["torchrun"], seconds["ray"])]


def compare(torchrun: list[float], ray: list[float]) -> Comparison:
    """Compare the best start of Ray Train, with a local Ray, with torchrun's best."""
    return Comparison(
        name="from the command to the first step",
        reference=f"torchrun: {spread(torchrun)} s",
        ours=f"Ray Train: {spread(ray)} s",
        ratio=min(ray) / min(torchrun),
        n=len(ray),
        note=NOTE,
        data={"torchrun": torchrun, "ray": ray},
    )


def _until_first_step(run: Run) -> float:
    return datetime.fromisoformat(run.result["times"]["first_step"]).timestamp() - run.started_at
