"""Drills: runs are disturbed at random moments, in every way they should survive, and have to end as if they were not.

usage: python -m bench.drills [-n N] [--seed N] [--kind KIND …]

Exit status: 0 if every run ended with the undisturbed run's weights, 1 if one did not.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from bench.disturbed import EPOCHS, STEPS, WORKERS, Run
from bench.nodes import Nodes, end, kill, until
from bench.report import spread
from bench.slow import FOLDER

TOTAL = EPOCHS * STEPS
STEP_SECONDS = 0.15
DRAIN_SECONDS = "40"
STALL = ("--stall-timeout", "15")


def kill_worker(run: Run, chance: random.Random) -> None:
    """SIGKILL to a process that trains."""
    kill(chance.choice(run.nodes.trainers()).pid)


def kill_raylet(run: Run, chance: random.Random) -> None:
    """SIGKILL to a node's raylet, which takes the node; another comes for it."""
    [raylet] = run.nodes.processes(chance.choice(run.nodes.workers), "raylet/raylet")
    kill(raylet.pid)


def kill_driver(run: Run, chance: random.Random) -> None:
    """SIGKILL to the command, which is typed again."""
    if run.command:
        kill(run.command.pid)
        run.command.wait()
    run.start(seconds=STEP_SECONDS)


def stop_node(run: Run, chance: random.Random) -> None:
    """SIGTERM to a node, as ECS sends it before a spot instance goes or a task is replaced; another comes for it."""
    chance.choice(run.nodes.workers).send_signal(signal.SIGTERM)


def freeze_worker(run: Run, chance: random.Random) -> None:
    """SIGSTOP to a process that trains: it hangs, and the others wait for it."""
    chance.choice(run.nodes.trainers()).suspend()


KINDS: dict[str, Callable[[Run, random.Random], None]] = {
    "worker killed": kill_worker,
    "raylet killed": kill_raylet,
    "driver killed": kill_driver,
    "node told to stop": stop_node,
    "worker frozen": freeze_worker,
}


@dataclass(frozen=True)
class Drill:
    """What came of one.

    Attributes:
        ended: Whether the run ended by itself, with exit status 0.
        same: Whether its weights are the undisturbed run's.
        stood: The longest time without a step after the disturbance, in seconds.
        repeated: Steps that were made twice.
    """

    ended: bool
    same: bool
    stood: float
    repeated: int


def main() -> int:
    """Drill, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.drills", description="Disturb runs at random moments.")
    parser.add_argument("-n", type=int, default=10, help="drills of each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    arguments = parser.parse_args()
    console, chance = Console(stderr=True), random.Random(arguments.seed)
    found: dict[str, list[Drill]] = {}
    with tempfile.TemporaryDirectory(prefix="drills-") as folder, Nodes(WORKERS, _variables(folder)) as nodes:
        whole = Run(nodes, "undisturbed").start()
        if whole.finish():
            print(f"drills: the undisturbed run failed:\n{whole.log[-2000:]}", file=sys.stderr)
            return 1
        for number in range(arguments.n):
            for kind in arguments.kind:
                drill = _drill(Run(nodes, f"{kind.replace(' ', '-')}-{number}"), kind, whole, chance, console)
                found.setdefault(kind, []).append(drill)
    Console(width=120).print(table(found))
    return 0 if all(each.ended and each.same for drills in found.values() for each in drills) else 1


def _variables(folder: str) -> dict[str, str]:
    return {FOLDER: folder, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": DRAIN_SECONDS}


def _drill(run: Run, kind: str, whole: Run, chance: random.Random, console: Console) -> Drill:
    run.nodes.replace_ended()
    until(lambda: not run.nodes.trainers(), 60)  # of the run before
    step = chance.randrange(1, TOTAL - 1)
    run.start(*STALL, seconds=STEP_SECONDS)
    try:
        run.wait_for_steps(step)
        time.sleep(chance.uniform(0, STEP_SECONDS))
        disturbed = time.time()
        KINDS[kind](run, chance)
        ended = run.finish() == 0
    except (AssertionError, TimeoutError) as cause:
        console.print(f"{run.name}: {cause}", highlight=False)
        ended, disturbed = False, time.time()
    finally:
        if run.command:
            end(run.command.pid)
    moments = [disturbed, *(each for each in run.moments if each > disturbed)]
    stood = max((after - before for before, after in pairwise(moments)), default=0.0)
    drill = Drill(ended, ended and run.ends_as(whole), stood, len(run.moments) - TOTAL)
    console.print(f"{run.name}: disturbed at step {step} of {TOTAL}, {drill}", style="dim", highlight=False)
    if not ended:
        console.print(run.log[-3000:], highlight=False, markup=False)
    return drill


def table(found: dict[str, list[Drill]]) -> Table:
    """A row for each kind: medians, with the least and the greatest."""
    shown = Table(title=f"Runs of {TOTAL} steps on {WORKERS} workers, a checkpoint whenever the one before is stored")
    for heading in ("disturbance", "runs", "ended", "same weights", "s without a step", "steps repeated"):
        shown.add_column(heading, justify="left" if heading == "disturbance" else "right")
    for kind, drills in found.items():
        ended, same = (sum(getattr(each, name) for each in drills) for name in ("ended", "same"))
        stood = spread([each.stood for each in drills])
        repeated = [each.repeated for each in drills]
        steps = f"{statistics.median(repeated):g} ({min(repeated)} to {max(repeated)})"
        shown.add_row(kind, str(len(drills)), str(ended), str(same), stood, steps)
    return shown


if __name__ == "__main__":
    sys.exit(main())
