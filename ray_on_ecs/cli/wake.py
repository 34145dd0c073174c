"""`ray-on-ecs wake`: start a head that sleeps."""

from __future__ import annotations

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import note
from ray_on_ecs.cluster import session
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.errors import HeadUnavailable, TrainingError, UsageError
from ray_on_ecs.jobs.remote import SILENT_SECONDS, RemoteJobs, is_asleep


@click.command("wake")
@on_cluster
def command(cluster: Cluster) -> None:
    """Start a head that sleeps, and wait until it is up. A run, a shell, a notebook and the dashboard do so, too."""
    jobs = cluster.jobs(note)
    if not isinstance(jobs, RemoteJobs):
        raise UsageError(f"{cluster.name} does not sleep; ray-on-ecs wake is for the cluster of a stack")
    state, age = jobs.state()
    if state.wake is None and age > SILENT_SECONDS:
        raise HeadUnavailable(
            "the head is silent, and not asleep: its stack has no sleepAfterMinutes, or pulumi up has not replaced it "
            f"since; {cluster.command('status')} shows why it is away"
        )
    jobs.awaken()
    sleeps = f"; it sleeps after {state.wake.after_minutes:g} idle minutes" if state.wake else ", and does not sleep"
    note(f"the cluster is awake{sleeps}")


def awaken(cluster: Cluster) -> None:
    """Wake the head of a stack for a connection, and wait for it; raise as `RemoteJobs.awaken` does.

    Unless it sleeps, the connection itself says what is wrong: a head that is silent may run nevertheless.
    """
    jobs = cluster.jobs(note) if cluster.stack else None
    if not isinstance(jobs, RemoteJobs):
        return
    try:
        state, age = jobs.state()
    except TrainingError:
        return
    sleeps = is_asleep(state, age)
    if age > SILENT_SECONDS and not sleeps:
        return
    if sleeps:
        session.plugin_version()  # a missing one is said now, and not in five minutes
    try:
        jobs.awaken()
    except TrainingError:
        if sleeps:
            raise
