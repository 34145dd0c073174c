"""`ray-on-ecs stop`: stop a run or all jobs."""

from __future__ import annotations

import time
from collections.abc import Collection

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.follow import way_on
from ray_on_ecs.cli.logs import jobs_of
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import elsewhere, find_run
from ray_on_ecs.cluster.jobs import Jobs
from ray_on_ecs.config import OWNER
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.jobs.record import RUN, Job, goes_on, is_of, stored_secrets

POLL_SECONDS = 0.2


@click.command("stop")
@click.argument("run", required=False)
@click.option("--all", "stops_all", is_flag=True, help="Stop every run under way, with --local those that runs lists.")
@on_cluster
def command(cluster: Cluster, run: str | None, stops_all: bool) -> int:
    """Stop RUN, which keeps its checkpoints; the same ray-on-ecs run with its --run-name resumes it."""
    if stops_all == bool(run):
        raise UsageError(f"RUN: give the name of one run, or --all; {cluster.command('runs')} lists the runs")
    jobs = cluster.jobs(note)
    if not run:
        _stop_all(cluster, jobs)
        return 0
    found = jobs_of(cluster, jobs, run, "stop")
    if not found:
        find_run(cluster, run)
    if not _stop(cluster, jobs, found, f"run {run}"):
        raise UsageError(f"run {run} is not under way; {cluster.command('runs')} lists the runs")
    note(f"run {run} is stopped; {way_on(cluster, run, 'the same ray-on-ecs run')}")
    return 0


def stop_run(cluster: Cluster, head: Jobs, run: str) -> bool:
    """Stop the jobs of a run; return True if one was under way. Raises as `_stop` and `jobs_of` do."""
    return _stop(cluster, head, jobs_of(cluster, head, run, "stop"), f"run {run}")


def _stop_all(cluster: Cluster, head: Jobs) -> None:
    """Stop all runs, on this machine those below the storage path, and name the others. Raises as `_stop` does."""
    running = {job["submission_id"]: job for job in filter(goes_on, head.list_jobs())}
    others = elsewhere(running.values(), cluster.storage_path) if cluster.is_here else []
    running = {job_id: job for job_id, job in running.items() if job not in others}
    for job in running.values():
        owner = "" if cluster.is_here else job["metadata"].get(OWNER)
        note(f"stopping run {job['metadata'].get('run_name')}" + (f" of {one_line(owner)}" if owner else ""))
    was_under_way = _stop(cluster, head, running, counted(len(running), "run"))
    here = f" in {cluster.storage_path}" if cluster.is_here else ""
    note(f"all runs{here} are stopped" if was_under_way else f"there is not a run under way{here}")
    if others:
        paths = ", ".join(dict.fromkeys(str(job["metadata"]["storage_path"]) for job in others))
        first = others[0]["metadata"]
        stops = cluster.command(f"stop {first['run_name']}", first["storage_path"])
        note(f"not stopped: {counted(len(others), 'run')} in {paths}; {stops} stops {'one' if others[1:] else 'it'}")


def _stop(cluster: Cluster, head: Jobs, jobs: dict[str, Job], what: str) -> bool:
    """Stop those jobs that are under way, wait for the end of their runs, and delete what is left of all.

    Return True if a job was under way; ResourceError if one has not ended in time, or AWS doesn't answer.
    """
    running = [job_id for job_id, job in jobs.items() if goes_on(job)]
    try:
        for job_id in running:
            head.stop_job(job_id)
        if running:
            _wait_for_end(head, [jobs[job_id] for job_id in running], what)
    except KeyboardInterrupt:
        if running and not cluster.is_here:
            note(f"the head stops {what} as soon as it reads the request")
        raise
    for uri, *names in {tuple(stored_secrets(job.get("metadata"))) for job in jobs.values()} - {()}:
        cluster.secrets_of(uri).delete(names)
    cluster.end_unused()
    return bool(running)


def _wait_for_end(head: Jobs, jobs: Collection[Job], what: str) -> None:
    """Wait for the end of jobs, and of those that a head submits in their place; ResourceError if it takes too long."""
    ids = {job["submission_id"] for job in jobs}
    runs = [run for job in jobs if (run := {key: job["metadata"][key] for key in RUN if key in job["metadata"]})]

    def is_meant(job: Job) -> bool:
        return job["submission_id"] in ids or any(is_of(job, run) for run in runs)

    deadline = time.monotonic() + head.stop_seconds
    said = False
    with out.status(f"stopping {what}"):
        while going_on := [job["submission_id"] for job in head.list_jobs() if goes_on(job) and is_meant(job)]:
            if not said and head.is_away():
                note(f"waiting for the head, which stops {what} as soon as it is up")
                said = True
            for job_id in going_on if time.monotonic() > deadline else ():
                if not head.kill_job(job_id):
                    late = f"job {job_id} has not ended in {head.stop_seconds:.0f} s"
                    cause = "the head stops it once it is up" if head.is_away() else "its log shows what it does"
                    raise ResourceError(f"{late}; {cause}")
            time.sleep(POLL_SECONDS)
