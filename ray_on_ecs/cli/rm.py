"""`ray-on-ecs rm`: delete runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ray_on_ecs import secrets
from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.completion import complete_run
from ray_on_ecs.cli.runs import ask_head
from ray_on_ecs.cli.screen import note
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import LOST_SECONDS, Folders, Job, RunInfo, find_run, list_folders
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from ray_on_ecs.storage.run_storage import RunStorage

# States of a run that a driver may still write to.
BUSY = (*layout.UNDER_WAY, "starting")
# States of a run whose driver is not heard of.
UNKNOWN = ("lost", "unreadable")
# A folder with one of these files is a run.
OF_RUNS = {layout.STATUS, layout.RESULT, layout.LOCK}
# Files that are deleted first, in this order, so that a run that is half deleted does not look like a finished one.
FIRST = (layout.RESULT, layout.STATUS)


@click.command("rm")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run)
@on_cluster
def command(cluster: Cluster, runs: tuple[str, ...]) -> None:
    """Delete RUNs with all that they left: results, files, logs and checkpoints.

    A run that is under way is refused; stop it first.
    """
    folders = {name: find_run(cluster, name) for name in dict.fromkeys(runs)}
    listed, jobs = list_folders(cluster, cluster.storage("")), ask_head(cluster)
    busy = under_way(cluster, listed, jobs, listed.runs(jobs))
    for name in folders:
        if not listed.files.get(name, {}).keys() & OF_RUNS:
            raise UsageError(f"{name}: is a folder without a run in {cluster.storage_path}; delete it yourself")
        if name in busy:
            unknown = " as far as is known" if jobs is None else ""
            killed = f"; if it was killed, try again in {LOST_SECONDS:.0f} s" if unknown and cluster.is_here else ""
            raise UsageError(f"run {name} is under way{unknown}; {cluster.command(f'stop {name}')} ends it{killed}")
    for name, storage in folders.items():
        delete(cluster, storage)
        note(f"run {name} is deleted")


def under_way(cluster: Cluster, folders: Folders, jobs: Sequence[Job] | None, runs: Sequence[RunInfo]) -> set[str]:
    """Return the names of the runs that a driver may still write to, by its job, its lock or its status."""
    of_jobs = folders.jobs_under_way(jobs)
    # A head of a stack that does not answer may have jobs; this machine without a head has none.
    busy = BUSY if jobs is not None or cluster.is_here else (*BUSY, *UNKNOWN)
    return {run.name for run in runs if run.name in of_jobs or run.state in busy or folders.is_locked(run.name)}


def delete(cluster: Cluster, storage: RunStorage) -> None:
    """Delete a run's secrets and its folder.

    Raises:
        ResourceError: A part of it can't be deleted; the same command deletes the rest.
    """
    try:
        if names := _stored_secrets(storage):
            cluster.secrets_of(storage.uri).delete(names)
        for name in FIRST:
            storage.delete(name)
        storage.filesystem.delete_dir(storage.path())
    except OSError as cause:
        raise ResourceError(f"run {storage.run_name} can't be deleted ({one_line(cause)}); try again") from cause


def _stored_secrets(storage: RunStorage) -> list[str]:
    try:
        return [item for item in secrets.earlier_items(storage.read_settings()) if "=" not in item]
    except UsageError:  # a document that is broken does not name a secret
        return []
