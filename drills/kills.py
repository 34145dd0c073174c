"""Kills of the head, the driver, a worker or a raylet, each at a random moment of a short run.

usage: python -m drills.kills [-n N] [--seed N] [--kind KIND …]

Each run is disturbed once. Its command ends well, or with one line that says why not; then nothing of the run goes on,
a killed head is replaced with all of its nodes, and the same command is repeated, as a user or the head would do it.

Exit status: 0 if every run ended with the undisturbed run's weights and nothing was left, 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
from rich.console import Console

from drills.__main__ import FLAGS, LOG_CHARACTERS, Site, prepared
from drills.disturbances import Disturber, TooLateError, wait_until
from tests.disturbed_run import END_SECONDS, EXAMPLE, S3Run
from tests.local_cluster import LocalCluster, have_ended, kill_tree
from tests.waiting import until

EPOCHS, STEP_SECONDS = 1, 0.1
# The scripts of a driver that is lost get SIGTERM after a minute, and half a minute more.
LEFT_SECONDS = 150.0
# A command that ended by a kill is repeated; so is one that met nodes on their way out.
MOST_COMMANDS = 4
OWN = "ray-on-ecs: "
# In the line on a run whose driver was killed after its last result.
FINISHED = "is finished, results in"


def kill_head(disturber: Disturber) -> None:
    """Kill the head with all of its processes, but for the driver."""
    head = disturber.run.cluster.head
    if disturber.run.has_ended or head is None:
        raise TooLateError
    kill_tree(head.pid)


def kill_driver(disturber: Disturber) -> None:
    """Kill the driver."""
    command = disturber.run.command
    if disturber.run.has_ended or command is None:
        raise TooLateError
    kill_tree(command.pid)
    command.wait()


KINDS: dict[str, Callable[[Disturber], None]] = {
    "head": kill_head,
    "driver": kill_driver,
    "worker": Disturber.kill_worker,
    "raylet": Disturber.kill_raylet,
}


class BrokenError(Exception):
    """A run did not do what it should."""


def main() -> int:
    """Disturb the runs and print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m drills.kills", description="Kill a part of each of many runs.")
    parser.add_argument("-n", type=int, default=200, help="runs (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kinds and moments (default: 0)")
    kinds = f"what is killed: {', '.join(KINDS)} (default: all)"
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND", help=kinds)
    arguments = parser.parse_args()
    if arguments.n < 1:
        parser.error(f"-n: {arguments.n} is less than 1")
    generator = random.Random(arguments.seed)
    outcomes: Counter[tuple[str, str]] = Counter()
    console = Console(width=160, highlight=False)
    with prepared(Console(stderr=True, highlight=False), EXAMPLE) as site:
        started = time.time()
        undisturbed = start(site, "undisturbed")
        if undisturbed.finish():
            console.print(f"the undisturbed run failed:\n{undisturbed.log[-LOG_CHARACTERS:]}", markup=False)
            return 1
        seconds = time.time() - started
        console.print(f"undisturbed: {seconds:.0f} s")
        for number in range(1, arguments.n + 1):
            kind, moment = generator.choice(arguments.kind), generator.uniform(0, seconds)
            run = start(site, f"{kind}-{number}")
            try:
                said = disturb(run, kind, moment, generator)
                compare(run, undisturbed)
                outcome = "the undisturbed weights"
            except (BrokenError, TimeoutError) as error:
                said, outcome = [str(error)], "BROKEN"
            finally:
                if run.command:
                    kill_tree(run.command.pid)
            outcomes[kind, outcome] += 1
            console.print(f"{number} of {arguments.n}: {kind} killed after {moment:.1f} s: {outcome}", markup=False)
            for line in said:
                console.print(f"    {line}", markup=False)
            if outcome == "BROKEN":
                console.print(run.log[-LOG_CHARACTERS:], markup=False)
    for (kind, outcome), count in sorted(outcomes.items()):
        console.print(f"{kind}: {count} with {outcome}", markup=False)
    return 1 if any(outcome == "BROKEN" for _, outcome in outcomes) else 0


def start(site: Site, name: str) -> S3Run:
    """Start a run on a whole cluster."""
    repair(site.cluster)
    run = S3Run(site.cluster, name, FLAGS, site.script, EPOCHS, client=site.client)
    run.start(step_seconds=STEP_SECONDS)
    return run


def repair(cluster: LocalCluster) -> None:
    """Start another cluster if the head has ended, or else the nodes that have."""
    if cluster.head and cluster.head.poll() is not None:
        cluster.start_again()
    cluster.replace_ended()


def disturb(run: S3Run, kind: str, moment: float, generator: random.Random) -> list[str]:
    """Kill a part of a run, and repeat its command until it ends well; return the last lines of the others.

    Raises:
        BrokenError: A command ended without a line that says why, or left something that goes on.
    """
    disturber = Disturber(run, generator, run.start, suppress, suppress, 0.0)
    if wait_until(run, time.time() + moment):
        with suppress(TooLateError, psutil.NoSuchProcess):
            KINDS[kind](disturber)
    said: list[str] = []
    is_killed = kind == "driver"
    for _ in range(MOST_COMMANDS):
        status = wait_for_end(run, replace=kind != "head")
        if status and not is_killed:
            said.append(last_line(run))
        has_finished = status == 0 or FINISHED in " ".join(said[-1:])
        is_killed = False
        if has_finished or kind != "driver":
            wait_for_nothing(run)
        if has_finished:
            return said
        repair(run.cluster)
        run.start(step_seconds=STEP_SECONDS)
    raise BrokenError(f"{MOST_COMMANDS} commands ended: {said}")


def wait_for_end(run: S3Run, *, replace: bool) -> int:
    """Wait for the end of a run's command; return its exit status."""

    def has_ended() -> bool:
        if replace:
            run.cluster.replace_ended()
        return run.has_ended

    until(has_ended, END_SECONDS)
    return run.command.returncode if run.command else 0


def last_line(run: S3Run) -> str:
    """Return the line with which a command has ended.

    Raises:
        BrokenError: It does not say why.
    """
    line = run.log.rstrip().rpartition("\n")[2]
    if not line.startswith(OWN):  # a run that has not begun, since its head has gone, has no name to continue with
        raise BrokenError(f"the last line does not say why the command ended: {line}")
    return line


def wait_for_nothing(run: S3Run) -> None:
    """Wait until all processes of a run have ended.

    Raises:
        BrokenError: One goes on.
    """
    with suppress(TimeoutError):
        until(lambda: not list(left(run)), LEFT_SECONDS)
        return
    raise BrokenError(f"still running: {[' '.join(each.cmdline()) for each in left(run)]}")


def left(run: S3Run) -> Iterator[psutil.Process]:
    """Yield the processes of a run's workers, and of its script with the supervisors."""
    uri = f"{run.storage_path}/{run.name}"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RUN_URI") == uri and not have_ended([process]):
                yield process
    yield from run.cluster.actors()


def compare(run: S3Run, undisturbed: S3Run) -> None:
    """Raise BrokenError if a run has other weights than the undisturbed one."""
    if not run.has_weights_of(undisturbed):
        raise BrokenError("the weights differ from the undisturbed run's")


if __name__ == "__main__":
    sys.exit(main())
