"""`ray-on-ecs prune`: delete the runs that ended long ago."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.rm import OF_RUNS, delete, under_way
from ray_on_ecs.cli.runs import ask_head, table
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import Folders, Job, RunInfo, list_folders
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from ray_on_ecs.storage.run_storage import RunStorage

DAY_SECONDS = 86400.0


@click.command("prune")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    required=True,
    metavar="DAYS",
    help="Minimum number of days since a run ended.",
)
@click.option("--yes", is_flag=True, help="Delete without asking.")
@on_cluster
def command(cluster: Cluster, older_than: float, yes: bool) -> None:
    """Delete runs that ended more than DAYS ago, and unused code. The command lists them and asks first.

    Runs that are under way stay.
    """
    folders, jobs, old = _old_runs(cluster, older_than)
    if not old:
        note(f"no runs ended more than {older_than:g} days ago")
        return
    out.print(table(old))
    if not yes:
        try:
            is_confirmed = click.confirm(f"Delete {counted(len(old), 'run')} with results and checkpoints?", err=True)
        except click.Abort:  # Ctrl-C, or the end of the input
            if sys.stdin.isatty():
                raise
            raise UsageError("nothing was deleted; --yes deletes these runs without asking") from None
        if not is_confirmed:
            raise click.Abort
        confirmed = {run.name for run in old}
        folders, jobs, old = _old_runs(cluster, older_than)  # one may have been resumed meanwhile
        old = [run for run in old if run.name in confirmed]
    for run in old:
        delete(cluster, cluster.storage(run.name))
    code = 0
    if jobs is not None or cluster.is_here:
        code = _delete_code(folders, folders.files.keys() - {run.name for run in old}, jobs or (), older_than)
    note(f"{counted(len(old), 'run')} deleted, and {counted(code, 'archive')} of code")


def _old_runs(cluster: Cluster, older_than: float) -> tuple[Folders, list[Job] | None, list[RunInfo]]:
    """Return all folders, Ray's jobs, and the runs that have ended so long ago."""
    folders, jobs = list_folders(cluster, cluster.storage("")), ask_head(cluster)
    runs = [run for run in folders.runs(jobs) if folders.files.get(run.name, {}).keys() & OF_RUNS]
    busy = under_way(cluster, folders, jobs, runs)
    return folders, jobs, [run for run in runs if run.name not in busy and _age_days(run, folders) > older_than]


def _age_days(run: RunInfo, folders: Folders) -> float:
    """Return how many days ago a run was heard of, by the storage's clock; 0 if that is not known."""
    if run.updated is None:
        return 0.0
    return (folders.now - datetime.fromisoformat(run.updated).timestamp()) / DAY_SECONDS


def _delete_code(folders: Folders, remaining: Iterable[str], jobs: Sequence[Job], older_than: float) -> int:
    """Delete the stored code that is as old and that no run or job names; return how many archives that were.

    A queued job names its code only in its command.

    Raises:
        ResourceError: A run can't be read, so that what it needs is not known, or an archive can't be deleted.
    """
    from pyarrow import fs

    from ray_on_ecs.run.code_archive import FOLDER

    storage = folders.storage
    try:
        listed = storage.filesystem.get_file_info(fs.FileSelector(f"{storage.base}/{FOLDER}", allow_not_found=True))
        with_settings = [name for name in remaining if layout.SETTINGS in folders.files.get(name, {})]
        needed = [_settings_text(folders.of(name)) for name in with_settings]
        needed += [str(job.get("entrypoint")) for job in jobs]
        unused = [
            archive
            for archive in listed
            if folders.now - (archive.mtime_ns or 0) / 1e9 > older_than * DAY_SECONDS
            and not any(archive.base_name in code for code in needed)
        ]
        for archive in unused:
            storage.filesystem.delete_file(archive.path)
    except OSError as cause:
        raise ResourceError(f"code that no run needs can't be deleted ({one_line(cause)}); try again") from cause
    return len(unused)


def _settings_text(storage: RunStorage) -> str:
    """Return the text of a run's settings, which has the name of its code; also of broken ones."""
    try:
        return str(storage.read_json(layout.SETTINGS))
    except UsageError:
        return storage.read(layout.SETTINGS).decode(errors="replace")
