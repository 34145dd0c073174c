"""`ray-on-ecs stop`."""

from __future__ import annotations

import time

import click

from ray_on_ecs.cli.logs import jobs_of
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cluster.clusters import Cluster, Head, on_cluster
from ray_on_ecs.errors import ResourceError, UsageError, one_line

# A driver that is asked to stop writes a last checkpoint.
STOP_SECONDS = 180.0
POLL_SECONDS = 1.0


@click.command("stop")
@click.argument("run")
@on_cluster
def command(cluster: Cluster, run: str) -> int:
    """Stop RUN, which keeps its checkpoints; the same ray-on-ecs run with its --run-name resumes it.

    With --local Ray ends, too, if it was started for a run and no other one is under way.
    """
    with cluster.connect() as head:
        was_under_way = stop_run(head, run)
    has_ended = cluster.down(run)
    if was_under_way:
        line = f"run {run} is stopped; the same ray-on-ecs run with --run-name {run} goes on from its last checkpoint"
        note(f"{line}, if any")
    elif has_ended:
        note(f"run {run} was not under way; Ray on this machine has ended")
    else:
        raise UsageError(f"run {run} is not under way; {cluster.command('runs')} lists what is")
    return 0


def stop_run(head: Head, run: str) -> bool:
    """Stop the jobs of a run and wait for their end; return whether there was any.

    Raises:
        ResourceError: It has not ended in time, or the head doesn't answer.
    """
    client = head.jobs
    under_way = [job_id for job_id, job in jobs_of(client, run).items() if not job.status.is_terminal()]
    try:
        for job_id in under_way:
            client.stop_job(job_id)
        with out.status(f"stopping run {run}"):
            for job_id in under_way:
                _wait(client, job_id)
    except (OSError, RuntimeError) as cause:
        raise ResourceError(f"run {run} could not be stopped ({one_line(cause)}); try again") from cause
    return bool(under_way)


def _wait(client: object, job_id: str) -> None:
    from ray.job_submission import JobSubmissionClient

    assert isinstance(client, JobSubmissionClient)
    deadline = time.monotonic() + STOP_SECONDS
    while not client.get_job_status(job_id).is_terminal():
        if time.monotonic() > deadline:
            raise ResourceError(
                f"job {job_id} has not ended in {STOP_SECONDS:.0f} s; ray-on-ecs logs shows what it does"
            )
        time.sleep(POLL_SECONDS)
