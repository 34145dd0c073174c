"""`ray-on-ecs logs`: the log of a run, of its jobs or, once these are no longer listed, from the run's folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.follow import Follower, way_on
from ray_on_ecs.cli.screen import note, show
from ray_on_ecs.cluster.clusters import Cluster, HeadCluster
from ray_on_ecs.cluster.history import find_run, is_below
from ray_on_ecs.cluster.jobs import STATUSES, Jobs, driver_exit_status, of_run
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs.record import ENDED, RUN, Job
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.shown_log import Filter


@click.command("logs")
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Follow the log to the end, and exit with the run's status.")
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print only the last N lines, and with --follow those that follow.",
)
@on_cluster
def command(cluster: Cluster, run: str, follow: bool, tail: int | None) -> int:
    """Show the log of RUN, with all its jobs."""
    text, cause = "", None
    try:
        held = cluster.jobs(note)
        jobs = jobs_of(cluster, held, run, "logs")
        active = [job_id for job_id, job in jobs.items() if job["status"] not in ENDED]
        shown = [job_id for job_id in jobs if not (follow and job_id in active[-1:])]
        text = "".join(held.log(job_id) for job_id in shown)
    except (Elsewhere, ResourceError) as fault:
        jobs, cause = {}, fault
    else:
        if follow and active:
            so_far = ""
            if tail is not None:
                with suppress(ResourceError):  # else all of the log is shown
                    so_far = held.log(active[-1])
            number = len(_lines(so_far.rpartition("\n")[0]))  # the last line may not be complete yet
            show(_last(_lines(text), None if tail is None else max(tail - number, 0)))
            metadata, skipped = jobs[active[-1]]["metadata"], 0 if tail is None else max(number - tail, 0)
            run_of_job = {key: metadata[key] for key in RUN if key in metadata}
            return Follower(cluster, held, run_of_job, skipped).follow(active[-1])
    show(_last(_lines(text or _stored(cluster, run, cause)), tail))
    return _exit_status(cluster, run, jobs) if follow else 0


class Elsewhere(UsageError):
    """The runs of a name are below other storage paths."""


def jobs_of(cluster: Cluster, head: Jobs, run: str, subcommand: str) -> dict[str, Job]:
    """Return the jobs of a run, or the one of this ID, by ID in the order of their start.

    A run of this name below another storage path is another run. On a stack it is meant if there is only that one.
    Elsewhere, with a hint for this subcommand, if there are other runs of this name, and on a stack several.
    """
    listed = head.list_jobs()
    jobs = of_run(listed, {"run_name": run}) or {
        job_id: job for job_id, job in of_run(listed, {}).items() if job_id == run
    }
    paths = {job_id: str(job["metadata"].get("storage_path")) for job_id, job in jobs.items()}
    own = {job_id: job for job_id, job in jobs.items() if is_below(job["metadata"], cluster.storage_path)}
    others = sorted(set(paths.values()))
    if own or len(others) < (1 if cluster.is_here else 2):
        return own or jobs
    if isinstance(cluster, HeadCluster):  # this machine, or the head's container
        there = cluster.command(f"{subcommand} {run}", others[0])
        raise Elsewhere(f"run {run} is below {' and '.join(others)}: {there}")
    of_jobs = " or ".join(cluster.command(f"{subcommand} {job_id}") for job_id in jobs if job_id != run)
    raise Elsewhere(f"there is a run {run} below each of {', '.join(others)}: {of_jobs}")


def _exit_status(cluster: Cluster, run: str, jobs: dict[str, Job]) -> int:
    """Return the exit status of a run that has ended: its last job's, or that of the state in its folder."""
    storage = replace(cluster.storage(run), flag="RUN")
    if jobs:
        job_id, job = list(jobs.items())[-1]
        return driver_exit_status(job_id, job, storage, lambda: way_on(cluster, run))
    state = (storage.read_json(layout.STATUS) or {}).get("state")
    if not isinstance(state, str) or state not in STATUSES:
        raise ResourceError(
            f"run {run} was {state or 'not started'} at its last update; {cluster.command('runs')} shows its state"
        )
    return STATUSES[state]


def _stored(cluster: Cluster, run: str, cause: TrainingError | None) -> str:
    """Return the logs in the run's folder, as those of its jobs can't be read by this cause; UsageError without one.

    There may be an earlier run here if the jobs are elsewhere.
    """
    storage = cluster.storage(run)
    try:
        names = sorted(storage.file_sizes(layout.LOGS))
        texts = [storage.read(f"{layout.LOGS}/{name}").decode(errors="replace") for name in names]
    except OSError as fault:
        find_run(cluster, run)  # the storage path may not be a folder
        raise TrainingError(f"the logs of run {run} can't be read ({fault})") from fault
    if isinstance(cause, ResourceError) and texts:
        note(f"{cause}; this is the log that the run stored last:")
    elif cause and not texts:
        raise cause
    if not texts:
        find_run(cluster, run)
        raise UsageError(f"run {run} has no log yet; {cluster.command('runs')} shows its state")
    return "".join(texts)


def _lines(text: str) -> list[str]:
    return list(Filter().shown(text.removesuffix("\n").split("\n"))) if text else []


def _last(lines: list[str], tail: int | None) -> list[str]:
    return lines if tail is None else lines[max(len(lines) - tail, 0) :]
