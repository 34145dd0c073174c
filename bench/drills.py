"""Drills: runs are disturbed at random moments, in every way they should survive, and have to end as if they were not.

usage: python -m bench.drills [-n N] [--seed N] [--kind KIND …]

Of each kind there is one run, which is disturbed N times: at random steps, and at a random moment of each. Exit status:
0 if every run ended with the undisturbed run's weights, 1 if one did not.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import psutil
from rich.console import Console
from rich.table import Table

from bench.disturbed import END_SECONDS, STEPS, WORKERS, Run
from bench.nodes import Nodes, end, kill, until
from bench.report import spread
from bench.slow import FOLDER

EPOCHS = 6
TOTAL = EPOCHS * STEPS
STEP_SECONDS = 0.15
DRAIN_SECONDS, STALL_SECONDS = "40", "30"
# A step that a disturbance was too late for may still be made.
SETTLED_SECONDS = 1.5
# Nothing is refused here for having been disturbed too often.
PATIENCE = (
    "--epochs",
    str(EPOCHS),
    "--max-failures",
    "100",
    "--max-preemptions",
    "100",
    "--stall-timeout",
    STALL_SECONDS,
)


def kill_worker(run: Run, chance: random.Random) -> None:
    """SIGKILL to a process that trains."""
    kill(chance.choice(_trainers(run)).pid)


def kill_raylet(run: Run, chance: random.Random) -> None:
    """SIGKILL to a node's raylet, which takes the node; another comes for it."""
    kill(run.nodes.processes(chance.choice(run.nodes.workers), "raylet/raylet")[0].pid)


def kill_driver(run: Run, chance: random.Random) -> None:
    """SIGKILL to the command, which is typed again."""
    if run.command:
        kill(run.command.pid)
        run.command.wait()
    run.start(*PATIENCE, seconds=STEP_SECONDS)


def stop_node(run: Run, chance: random.Random) -> None:
    """SIGTERM to a node, as ECS sends it before a spot instance goes or a task is replaced; another comes for it."""
    chance.choice(run.nodes.workers).send_signal(signal.SIGTERM)


def freeze_worker(run: Run, chance: random.Random) -> None:
    """SIGSTOP to a process that trains: it hangs, and the others wait for it."""
    chance.choice(_trainers(run)).suspend()


def _trainers(run: Run) -> list[psutil.Process]:
    return until(run.nodes.trainers, END_SECONDS)


KINDS: dict[str, Callable[[Run, random.Random], None]] = {
    "worker killed": kill_worker,
    "raylet killed": kill_raylet,
    "driver killed": kill_driver,
    "node told to stop": stop_node,
    "worker frozen": freeze_worker,
}


@dataclass(frozen=True)
class Drill:
    """What came of one kind.

    Attributes:
        disturbed: At which steps.
        ended: Whether the run ended by itself, with exit status 0.
        same: Whether its weights are the undisturbed run's.
        stood: After each disturbance, the longest time without a step, in seconds.
        repeated: Steps that were made twice, for each disturbance in the mean.
    """

    disturbed: list[int]
    ended: bool
    same: bool
    stood: list[float]
    repeated: float


def main() -> int:
    """Drill, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.drills", description="Disturb runs at random moments.")
    parser.add_argument("-n", type=int, default=10, help=f"disturbances of each run, up to {TOTAL - 2} (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    arguments = parser.parse_args()
    if not 1 <= arguments.n <= TOTAL - 2:
        parser.error(f"-n: {arguments.n} is not from 1 to {TOTAL - 2}, the steps of a run but its first and last")
    console, found = Console(stderr=True), {}
    with tempfile.TemporaryDirectory(prefix="drills-") as folder, Nodes(WORKERS, _variables(folder)) as nodes:
        whole = Run(nodes, "undisturbed").start(*PATIENCE)
        if whole.finish():
            print(f"drills: the undisturbed run failed:\n{whole.log[-2000:]}", file=sys.stderr)
            return 1
        for kind in arguments.kind:
            chance = random.Random(f"{arguments.seed} {kind}")
            found[kind] = _drill(Run(nodes, kind.replace(" ", "-")), kind, arguments.n, whole, chance, console)
    Console(width=120).print(table(found))
    return 0 if all(each.ended and each.same for each in found.values()) else 1


def _variables(folder: str) -> dict[str, str]:
    return {FOLDER: folder, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": DRAIN_SECONDS}


def _drill(run: Run, kind: str, times: int, whole: Run, chance: random.Random, console: Console) -> Drill:
    steps, moments = sorted(chance.sample(range(1, TOTAL - 1), times)), []
    run.nodes.replace_ended()
    run.start(*PATIENCE, seconds=STEP_SECONDS)
    try:
        for number, step in enumerate(steps):
            # What was repeated doesn't count; a disturbance comes after the one before has been got over.
            _wait_for_step(run, step, moments[-1] if moments else 0.0)
            time.sleep(chance.uniform(0, STEP_SECONDS))
            moments.append(time.time())
            console.print(f"{kind}: {number + 1} of {times}, at step {step} of {TOTAL}", style="dim", highlight=False)
            KINDS[kind](run, chance)
        ended = run.finish(END_SECONDS) == 0
    except (AssertionError, TimeoutError) as cause:
        console.print(f"{kind}: {cause}\n{run.log[-3000:]}", highlight=False, markup=False)
        ended = False
    finally:
        if run.command:
            end(run.command.pid)
    stood = [_longest_pause(run, *pair) for pair in pairwise([*moments, float("inf")])]
    repeated = (len(run.moments) - TOTAL) / times
    return Drill(steps[: len(moments)], ended, ended and run.ends_as(whole), stood, repeated)


def _wait_for_step(run: Run, step: int, after: float) -> None:
    """Wait until the run has made this step, and one after that moment."""

    def made() -> bool:
        run.nodes.replace_ended()
        return run.ended or (run.step >= step and run.moments[-1] > after + SETTLED_SECONDS)

    until(made, END_SECONDS)
    if run.ended:
        raise AssertionError("it has ended before it was disturbed as often as it should be")


def _longest_pause(run: Run, disturbed: float, following: float) -> float:
    """The longest time without a step between two disturbances, or after the last."""
    moments = [disturbed, *(each for each in run.moments if disturbed < each < following)]
    return max((after - before for before, after in pairwise(moments)), default=0.0)


def table(found: dict[str, Drill]) -> Table:
    """A row for each kind: medians, with the least and the greatest."""
    shown = Table(title=f"Runs of {TOTAL} steps on {WORKERS} workers, a checkpoint whenever the one before is stored")
    for heading in ("disturbance", "times", "ended", "same weights", "s without a step", "steps repeated, mean"):
        shown.add_column(heading, justify="left" if heading == "disturbance" else "right")
    for kind, drill in found.items():
        told = ("yes" if each else "NO" for each in (drill.ended, drill.same))
        stood = spread(drill.stood) if drill.stood else "-"
        shown.add_row(kind, str(len(drill.disturbed)), *told, stood, f"{drill.repeated:.1f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
