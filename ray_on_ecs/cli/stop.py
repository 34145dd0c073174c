"""`ray-on-ecs stop`: stop a run or all jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.logs import all_jobs, jobs_of
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.errors import HeadGone, ResourceError, UsageError, counted, one_line
from ray_on_ecs.node.jobs import stored_secrets

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# A driver that is asked to stop writes a last checkpoint.
STOP_SECONDS = 180.0
POLL_SECONDS = 1.0


@click.command("stop")
@click.argument("run", required=False)
@click.option("--all", "stops_all", is_flag=True, help="Stop every run, notebook and other job that is under way.")
@on_cluster
def command(cluster: Cluster, run: str | None, stops_all: bool) -> int:
    """Stop RUN, which keeps its checkpoints; the same ray-on-ecs run with its --run-name resumes it.

    With --local Ray ends, too, if it was started for a run and no other one is under way.
    """
    if stops_all == bool(run):
        raise UsageError(f"RUN: give the name of one run, or --all; {cluster.command('runs')} lists the runs")
    try:
        with cluster.connect() as head:
            was_under_way = stop_run(cluster, head, run) if run else stop_all(cluster, head)
    except HeadGone:
        if run or not cluster.ends_with_run:
            raise
        note("nothing to stop: Ray is not running on this machine")
        return 0
    has_ended = cluster.down()
    if not run:
        note("all submitted jobs are stopped" if was_under_way else "no submitted job is under way")
    elif was_under_way:
        line = f"run {run} is stopped; the same ray-on-ecs run with --run-name {run} resumes from its last checkpoint"
        note(f"{line}, if any")
    elif has_ended:
        note(f"run {run} was not under way; Ray on this machine has ended")
    else:
        raise UsageError(f"run {run} is not under way; {cluster.command('runs')} lists the runs")
    return 0


def stop_run(cluster: Cluster, head: Head, run: str) -> bool:
    """Stop the jobs of a run, wait for their end, and delete its secrets; return whether there was any job.

    Raises:
        ResourceError: It has not ended in time, or the head or AWS doesn't answer.
        UsageError: There are other runs of this name (see `jobs_of`).
    """
    jobs = jobs_of(cluster, head.jobs, run, "stop")
    was_under_way = _stop(head, _under_way(jobs), f"run {run}")
    _delete_secrets(cluster, jobs)
    return was_under_way


def stop_all(cluster: Cluster, head: Head) -> bool:
    """List all jobs under way, stop them, wait for their end, and delete their secrets; return whether there was any.

    Raises:
        ResourceError: One has not ended in time, or the head or AWS doesn't answer.
    """
    jobs = all_jobs(head.jobs)
    under_way = _under_way(jobs)
    for job_id in under_way:
        note(f"stopping job {job_id}")
    was_under_way = _stop(head, under_way, counted(len(under_way), "job"))
    _delete_secrets(cluster, {job_id: jobs[job_id] for job_id in under_way})
    return was_under_way


def _under_way(jobs: dict[str, Any]) -> list[str]:
    return [job_id for job_id, job in jobs.items() if not job.status.is_terminal()]


def _stop(head: Head, job_ids: list[str], what: str) -> bool:
    try:
        for job_id in job_ids:
            head.jobs.stop_job(job_id)
        with out.status(f"stopping {what}"):
            for job_id in job_ids:
                _wait(head.jobs, job_id)
    except (OSError, RuntimeError) as cause:
        raise ResourceError(f"{what} could not be stopped ({one_line(cause)}); try again") from cause
    return bool(job_ids)


def _delete_secrets(cluster: Cluster, jobs: dict[str, Any]) -> None:
    """Delete the secrets of the runs of these jobs, also if an earlier command could not."""
    for uri, *names in {tuple(stored_secrets(job.metadata)) for job in jobs.values()} - {()}:
        cluster.secrets_of(uri).delete(names)


def _wait(client: JobSubmissionClient, job_id: str) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while not client.get_job_status(job_id).is_terminal():
        if time.monotonic() > deadline:
            raise ResourceError(f"job {job_id} has not ended in {STOP_SECONDS:.0f} s; its log shows what it does")
        time.sleep(POLL_SECONDS)
