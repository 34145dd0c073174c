"""Drills: runs are disturbed at random moments, in every way they should survive, and have to end as if they were not.

usage: python -m bench.drills [-n N] [--seed N] [--kind KIND …]

Of each kind a run is disturbed N times: at random steps, and at a random moment of each. If it ends before, as the last
disturbance came too late to stop it, another one takes those that are left. Exit status: 0 if every run ended with the
undisturbed run's weights, 1 if one did not.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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


class TooLate(Exception):
    """There is nothing left to disturb."""


def kill_worker(run: Run, chance: random.Random) -> None:
    """SIGKILL to a process that trains."""
    kill(_trainer(run, chance).pid)


def kill_raylet(run: Run, chance: random.Random) -> None:
    """SIGKILL to a node's raylet, which takes the node; another comes for it."""
    if not (raylets := run.nodes.processes(chance.choice(run.nodes.workers), "raylet/raylet")):
        raise TooLate
    kill(raylets[0].pid)


def kill_driver(run: Run, chance: random.Random) -> None:
    """SIGKILL to the command, which is typed again."""
    if run.ended or run.command is None:
        raise TooLate
    kill(run.command.pid)
    run.command.wait()
    run.start(*PATIENCE, seconds=STEP_SECONDS)


def stop_node(run: Run, chance: random.Random) -> None:
    """SIGTERM to a node, as ECS sends it before a spot instance goes or a task is replaced; another comes for it."""
    chance.choice(run.nodes.workers).send_signal(signal.SIGTERM)


def freeze_worker(run: Run, chance: random.Random) -> None:
    """SIGSTOP to a process that trains: it hangs, and the others wait for it."""
    _trainer(run, chance).suspend()


def _trainer(run: Run, chance: random.Random) -> psutil.Process:
    found: list[psutil.Process] = []

    def find() -> bool:
        found[:] = run.nodes.trainers()
        return bool(found) or run.ended

    until(find, END_SECONDS)
    if not found:
        raise TooLate
    return chance.choice(found)


KINDS: dict[str, Callable[[Run, random.Random], None]] = {
    "worker killed": kill_worker,
    "raylet killed": kill_raylet,
    "driver killed": kill_driver,
    "node told to stop": stop_node,
    "worker frozen": freeze_worker,
}


@dataclass
class Drill:
    """What came of one kind.

    Attributes:
        runs: How many it took: one may end before it has been disturbed as often as it should be.
        disturbed: At which steps.
        ended: Whether every run ended by itself, with exit status 0.
        same: Whether its weights are the undisturbed run's.
        stood: After each disturbance, the longest time without a step, in seconds.
        repeated: Steps that were made twice.
    """

    runs: int = 0
    disturbed: list[int] = field(default_factory=list)
    ended: bool = True
    same: bool = True
    stood: list[float] = field(default_factory=list)
    repeated: int = 0

    def add(self, run: Run, whole: Run, moments: list[float], ended: bool) -> None:
        """Note a run that was disturbed at these moments, and whether it has ended by itself."""
        self.runs += 1
        self.ended = self.ended and ended
        self.same = self.same and ended and run.ends_as(whole)
        self.stood += [_longest_pause(run, *pair) for pair in pairwise([*moments, float("inf")])]
        self.repeated += max(len(run.moments) - TOTAL, 0)


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
            found[kind] = _drill(nodes, kind, arguments.n, whole, chance, console)
    Console(width=120).print(table(found))
    return 0 if all(each.ended and each.same for each in found.values()) else 1


def _variables(folder: str) -> dict[str, str]:
    return {FOLDER: folder, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": DRAIN_SECONDS}


def _drill(nodes: Nodes, kind: str, times: int, whole: Run, chance: random.Random, console: Console) -> Drill:
    drill = Drill()
    while len(drill.disturbed) < times and drill.same:
        run = Run(nodes, f"{kind.replace(' ', '-')}-{drill.runs + 1}")
        moments: list[float] = []
        nodes.replace_ended()
        run.start(*PATIENCE, seconds=STEP_SECONDS)
        try:
            for step in sorted(chance.sample(range(1, TOTAL - 1), times - len(drill.disturbed))):
                # What was repeated doesn't count; a disturbance comes after the one before has been got over.
                if not _reaches(run, step, moments[-1] if moments else 0.0):
                    break
                time.sleep(chance.uniform(0, STEP_SECONDS))
                moment = time.time()
                try:
                    KINDS[kind](run, chance)
                except (TooLate, psutil.NoSuchProcess):
                    break
                moments.append(moment)
                drill.disturbed.append(step)
                console.print(f"{kind}: {len(drill.disturbed)} of {times}, at step {step} of {TOTAL}", style="dim")
            drill.add(run, whole, moments, ended=run.finish(END_SECONDS) == 0)
        except TimeoutError as cause:
            console.print(f"{kind}: {cause}")
            drill.add(run, whole, moments, ended=False)
        finally:
            if run.command:
                end(run.command.pid)
        if not drill.same:
            console.print(run.log[-3000:], markup=False)
    return drill


def _reaches(run: Run, step: int, after: float) -> bool:
    """Wait until the run has made this step, and one after that moment; False if it ends before."""

    def made() -> bool:
        run.nodes.replace_ended()
        return run.ended or (run.step >= step and run.moments[-1] > after + SETTLED_SECONDS)

    until(made, END_SECONDS)
    return not run.ended


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
        shown.add_row(
            kind, str(len(drill.disturbed)), *told, stood, f"{drill.repeated / max(len(drill.disturbed), 1):.1f}"
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
