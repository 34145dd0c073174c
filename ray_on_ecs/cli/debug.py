"""`ray-on-ecs debug`: the stacks of all ranks of a run under way."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.logs import jobs_of
from ray_on_ecs.cli.screen import note, out, show
from ray_on_ecs.cluster.clusters import Cluster, HeadCluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.jobs.record import ENDED
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

# The workers have half of it.
ANSWER_SECONDS, POLL_SECONDS = 60.0, 0.3
WAITING = {"queued": "waits in the queue", "waiting": "waits for workers"}


@click.command("debug")
@click.argument("run")
@on_cluster
def command(cluster: Cluster, run: str) -> int:
    """Show the stacks of all ranks of RUN, which goes on, by groups; first the rank that the others wait for."""
    jobs = cluster.jobs(note)
    found = jobs_of(cluster, jobs, run, "debug")
    active = [job for job in found.values() if job["status"] not in ENDED]
    if not found:
        find_run(cluster, run)
    if not active:
        see = f"{cluster.command('runs')} lists the runs, and {cluster.command(f'logs {run}')} shows how it has ended"
        raise UsageError(f"run {run} is not under way; {see}")
    job = active[-1]
    metadata = job["metadata"]
    storage = cluster.storage(metadata["run_name"], str(metadata.get("storage_path") or ""))
    state = (storage.read_json(layout.STATUS) or {}).get("state")
    if waits := WAITING.get(str(state)):
        raise UsageError(f"run {run} {waits}, and has no ranks yet; {cluster.command(f'logs {run}')} shows what for")
    request = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"
    folder = f"{layout.STACKS_FOLDER}/{request}"
    with out.status("reading the stacks"):
        jobs.ask_stacks(job["submission_id"], request)
        if storage.is_local and not isinstance(cluster, HeadCluster):
            shows = f"{cluster.command(f'logs {run}')} shows where the ranks are"
            note(f"the stacks are in {storage.uri}/{folder} on the nodes; {shows}")
            return 0
        text = _wait_for(storage, f"{folder}/{layout.STACKS}")
    if not text:
        raise ResourceError(
            f"the driver of run {run} has not answered in {ANSWER_SECONDS:.0f} s: the run may start, end or wait for "
            f"workers; {cluster.command(f'logs {run}')} shows what it does"
        )
    show(text.splitlines())
    note(f"all threads and processes: {storage.uri}/{folder}/rank_*.txt")
    return 0


def _wait_for(storage: RunStorage, name: str) -> str:
    """Return a file of the run's folder as soon as it is there; empty if it does not come."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not storage.exists(name):
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_SECONDS)
    return storage.read(name).decode(errors="replace")
