"""Drills: disturb runs at random moments, in every way that they should survive, and compare their weights.

usage: python -m drills [-n N] [--seed N] [--monitor-seconds S] [--script SCRIPT] [--kind KIND …]

An undisturbed run comes first. Its duration, from the command's start to its end, is the range from which the moments
are drawn: start-up and recovery are disturbed as well as training. A run is disturbed again and again until it ends
first; then another run takes the disturbances that are left of N. A run whose monitoring fails has longer steps: it
goes on until the monitoring is back.

Exit status: 0 if every run ended with the undisturbed run's weights, 1 if one did not, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from drills.disturbances import FREEZE_STALL_SECONDS, KINDS, Disturber, TooLateError, wait_until
from tests import aws, failing_monitor
from tests.disturbed_run import CLASSIFIER, END_SECONDS, EXAMPLE, FOLDER_VARIABLE, LANGUAGE, WORKERS, S3Run, Script
from tests.failing_monitor import CloudWatch
from tests.flaky_s3 import FlakyProxy, flaky_proxy
from tests.local_cluster import LocalCluster, kill_tree

# The packaged scripts, and one of a user's own; about as many steps of each.
SCRIPTS = {script.path: script for script in (CLASSIFIER, LANGUAGE, EXAMPLE)}
STEPS = 66
STEP_SECONDS = 0.3
# Steps of runs whose monitoring fails take 1/60 of that, which stays below the hang timeout.
MOST_MONITOR_SECONDS = 1200.0
DRAIN_SECONDS = 40
LOG_CHARACTERS = 3000
# No run is refused here because it was disturbed too often.
FLAGS = (
    *("--max-restarts", "100"),
    *("--hang-timeout", str(FREEZE_STALL_SECONDS)),
    *("--cloudwatch-namespace", "drills"),
)


@dataclass(frozen=True)
class Site:
    """Environment of the drills.

    Attributes:
        cluster: The Ray cluster.
        proxy: The proxy between the cluster and S3.
        cloudwatch: The cluster's CloudWatch.
        client: A boto3 client of S3, without the proxy.
        console: Shows the progress.
        script: The script of the disturbed runs.
    """

    cluster: LocalCluster
    proxy: FlakyProxy
    cloudwatch: CloudWatch
    client: Any
    console: Console
    script: Script

    def start(self, name: str, step_seconds: float = STEP_SECONDS) -> S3Run:
        """Start a run."""
        epochs = round(STEPS / self.script.steps_per_epoch)
        return restart(S3Run(self.cluster, name, FLAGS, self.script, epochs, client=self.client), step_seconds)


@dataclass(frozen=True)
class Baseline:
    """Undisturbed run, and the seconds from its command's start to its end."""

    run: S3Run
    seconds: float


@dataclass
class Drill:
    """Results of one kind of disturbance.

    Attributes:
        disturbances: The number of disturbances.
        ended: True if every run exited with status 0.
        same_weights: True if every run has the undisturbed run's weights.
        pauses: Seconds without a step after each disturbance.
        repeated_steps: The number of steps that were done twice.
    """

    disturbances: int = 0
    ended: bool = True
    same_weights: bool = True
    pauses: list[float] = field(default_factory=list)
    repeated_steps: int = 0

    @property
    def passed(self) -> bool:
        """True if every run ended with the undisturbed run's weights."""
        return self.ended and self.same_weights


def main() -> int:
    """Run the drills and print the table."""
    parser = argparse.ArgumentParser(prog="python -m drills", description="Disturb runs at random moments.")
    parser.add_argument("-n", type=int, default=10, help="disturbances of each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: 0)")
    monitor = f"seconds of monitor-failed without dashboard and CloudWatch: 60, {MOST_MONITOR_SECONDS:.0f} at most"
    parser.add_argument("--monitor-seconds", type=float, default=60.0, metavar="S", help=monitor)
    script = f"what is disturbed: {' or '.join(SCRIPTS)} (default: {CLASSIFIER.path})"
    parser.add_argument("--script", choices=list(SCRIPTS), default=CLASSIFIER.path, metavar="SCRIPT", help=script)
    kinds = f"kinds of disturbances: {', '.join(KINDS)} (default: all)"
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND", help=kinds)
    arguments = parser.parse_args()
    if arguments.n < 1:
        parser.error(f"-n: {arguments.n} is less than 1")
    if not 0 < arguments.monitor_seconds <= MOST_MONITOR_SECONDS:
        parser.error(f"--monitor-seconds: {arguments.monitor_seconds} is not within 0 and {MOST_MONITOR_SECONDS:.0f}")
    with prepared(Console(stderr=True, highlight=False), SCRIPTS[arguments.script]) as site:
        started = time.time()
        run = site.start("undisturbed")
        if run.finish():
            site.console.print(f"the undisturbed run failed:\n{run.log[-LOG_CHARACTERS:]}", markup=False)
            return 1
        baseline = Baseline(run, time.time() - started)
        site.console.print(f"undisturbed: {baseline.seconds:.0f} s from the command's start to its end")
        drills = {}
        for kind in arguments.kind:
            generator = random.Random(f"{arguments.seed} {kind}")
            drills[kind] = drill(site, kind, arguments.n, baseline, generator, arguments.monitor_seconds)
            site.console.print(table({kind: drills[kind]}))  # in case the others are interrupted
    Console(width=120).print(table(drills))
    return 0 if all(result.passed for result in drills.values()) else 1


@contextmanager
def prepared(console: Console, script: Script) -> Generator[Site]:
    """Start an AWS, proxies in front of its S3 and CloudWatch, and a cluster that reaches both through these."""
    with (
        tempfile.TemporaryDirectory(prefix="drills-") as folder,
        aws.moto_server() as url,
        flaky_proxy(url, 0.0) as proxy,
        failing_monitor.cloudwatch(url) as cloudwatch,
    ):
        client = aws.client("s3", url)
        client.create_bucket(Bucket=aws.BUCKET)
        variables = {
            **aws.environment(proxy.url),
            "AWS_ENDPOINT_URL_CLOUDWATCH": cloudwatch.url,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
            FOLDER_VARIABLE: folder,
        }
        with LocalCluster(WORKERS, variables) as cluster:
            yield Site(cluster, proxy, cloudwatch, client, console, script)


def restart(run: S3Run, step_seconds: float = STEP_SECONDS) -> S3Run:
    """Start a run's command, for the first time or again."""
    run.start(step_seconds=step_seconds)
    return run


def drill(
    site: Site, kind: str, count: int, baseline: Baseline, generator: random.Random, monitor_seconds: float
) -> Drill:
    """Disturb runs until there have been `count` disturbances, or a run has ended with other weights."""
    result = Drill()
    runs = 0
    step_seconds = STEP_SECONDS
    if kind == "monitor-failed":
        step_seconds = max(step_seconds, 1.1 * (baseline.seconds + monitor_seconds) / STEPS)
    while result.disturbances < count and result.passed:
        runs += 1
        site.cluster.replace_ended()
        run = site.start(f"{kind}-{runs}", step_seconds)
        outages = site.proxy.outage, site.cloudwatch.outage
        disturber = Disturber(run, generator, partial(restart, run, step_seconds), *outages, monitor_seconds)
        try:
            for line in disturb(disturber, KINDS[kind], count - result.disturbances, baseline.seconds):
                site.console.print(f"{kind}: {line}")
            result.ended = run.finish(END_SECONDS + STEPS * step_seconds) == 0
        except TimeoutError as error:
            site.console.print(f"{kind}: {error}", markup=False)
            result.ended = False
        finally:
            if run.command:
                kill_tree(run.command.pid)
        result.same_weights = result.ended and run.has_weights_of(baseline.run)
        result.disturbances += len(disturber.moments)
        result.pauses += pauses(run.step_times, disturber.moments)
        result.repeated_steps += max(len(run.step_times) - run.steps, 0)
        if not result.passed:
            site.console.print(run.log[-LOG_CHARACTERS:], markup=False)
        outcome = "the undisturbed run's weights" if result.passed else "OTHER weights, or not at all"
        site.console.print(f"{kind}: {result.disturbances} of {count} done; run {runs} ended with {outcome}")
    return result


def disturb(
    disturber: Disturber, disturbance: Callable[[Disturber], None], count: int, seconds: float
) -> Iterator[str]:
    """Disturb a run until it ends, `count` times at most, and yield a line about each disturbance.

    Each one comes at a random moment within `seconds` after the run's start or the previous disturbance.
    """
    run, started = disturber.run, time.time()
    while len(disturber.moments) < count:
        if not wait_until(run, time.time() + disturber.random.uniform(0, seconds)):
            return
        moment, steps = time.time(), len(run.step_times)
        try:
            disturbance(disturber)
        except (TooLateError, psutil.NoSuchProcess):
            return
        disturber.moments.append(moment)
        yield f"{moment - started:.0f} s after the start of {run.name}, {steps} steps made"


def pauses(step_times: Sequence[float], moments: Sequence[float]) -> list[float]:
    """Return, for each disturbance, the longest time without a step that began before the next disturbance.

    A pause counts to its end, even if the next disturbance comes before. After the last step there is none.
    """
    longest = []
    for moment, following in pairwise([*moments, float("inf")]):
        later = [moment, *(step_time for step_time in step_times if step_time > moment)]
        longest.append(max((after - before for before, after in pairwise(later) if before < following), default=0.0))
    return longest


def table(drills: dict[str, Drill]) -> Table:
    """Build the table, with a row for each kind."""
    shown = Table(
        title=f"Runs of about {STEPS} steps on {WORKERS} workers, a checkpoint as soon as the previous one is saved"
    )
    shown.add_column("disturbance")
    for heading in ("n", "ended", "same weights", "seconds without a step", "steps made twice, mean"):
        shown.add_column(heading, justify="right")
    for kind, result in drills.items():
        shown.add_row(
            kind,
            str(result.disturbances),
            "yes" if result.ended else "NO",
            "yes" if result.same_weights else "NO",
            _median_and_range(result.pauses),
            f"{result.repeated_steps / max(result.disturbances, 1):.1f}",
        )
    return shown


def _median_and_range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
