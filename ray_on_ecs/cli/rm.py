"""`ray-on-ecs rm`: delete runs, by their names or by their age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime

import click

from ray_on_ecs import secrets
from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.runs import WIDTH, ago, ask_head, table
from ray_on_ecs.cli.screen import Screen, note, out
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import LOST_SECONDS, Folders, Job, RunInfo, find_run, list_folders, under_way
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

# States of a run that a driver may still write to.
BUSY = (*layout.UNDER_WAY, "starting")
# States of a run whose driver is not heard of.
UNKNOWN = ("lost", "unreadable")
# A folder with one of these files is a run.
OF_RUNS = {layout.SETTINGS, layout.STATUS, layout.RESULT, layout.LOCK}
# Files that are deleted first, in this order, so that a run that is half deleted does not look like a finished one.
FIRST = (layout.RESULT, layout.STATUS)


@click.command("rm")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="In place of names: delete the runs that ended more than DAYS ago, and stored code that no run needs.",
)
@click.option("--yes", is_flag=True, help="With --older-than, delete without asking.")
@on_cluster
def command(cluster: Cluster, runs: tuple[str, ...], older_than: float | None, yes: bool) -> int:
    """Delete RUNs with all that they left: results, files, logs and checkpoints.

    --older-than lists the runs, and asks first. A run that is under way is never deleted; stop it first.
    """
    if bool(runs) == (older_than is not None):
        listed = cluster.command("runs")
        raise UsageError(f"RUN...: give the names of runs, or --older-than DAYS alone; {listed} lists the runs")
    if older_than is not None:
        return _delete_old(cluster, older_than, is_confirmed=yes)
    _delete_named(cluster, runs)
    return 0


def _delete_named(cluster: Cluster, runs: Sequence[str]) -> None:
    folders = {name: find_run(cluster, name) for name in dict.fromkeys(runs)}
    listed, jobs = list_folders(cluster, cluster.storage(""), folders), ask_head(cluster)
    busy = _under_way(cluster, listed, jobs, listed.runs(jobs))
    for name in folders:
        if not listed.files.get(name, {}).keys() & OF_RUNS:
            raise UsageError(f"{name}: is a folder without a run in {cluster.storage_path}; delete it yourself")
        if name in busy:
            unknown = " as far as is known" if jobs is None else ""
            may_be_dead = jobs is not None and name not in under_way(jobs, listed.storage.uri)
            if may_be_dead and not cluster.is_here:  # after the loss of its head
                raise UsageError(
                    f"run {name} may be under way, as it has just been written; try again in {LOST_SECONDS:.0f} s"
                )
            killed = f"; if it was killed, try again in {LOST_SECONDS:.0f} s" if may_be_dead else ""
            raise UsageError(f"run {name} is under way{unknown}; {cluster.command(f'stop {name}')} ends it{killed}")
    for name, storage in folders.items():
        _delete(cluster, storage)
        note(f"run {name} is deleted")


def _delete_old(cluster: Cluster, older_than: float, *, is_confirmed: bool) -> int:
    """Delete the runs that are as old, after a question; return the exit status, 1 if the answer is no."""
    folders, jobs, old = _old_runs(cluster, older_than)
    if not old:
        note(f"no runs ended more than {older_than:g} days ago")
        return 0
    _list_old(old)
    if not is_confirmed:
        try:
            answer = click.confirm(f"Delete {counted(len(old), 'run')} with results and checkpoints?", err=True)
        except click.Abort as end:
            note("")  # after the question
            if isinstance(end.__context__, KeyboardInterrupt):
                raise
            raise UsageError("nothing is deleted; --yes deletes these runs without asking") from None
        if not answer:
            note("nothing is deleted")
            return 1
        confirmed = {run.name for run in old}
        folders, jobs, old = _old_runs(cluster, older_than)  # one may have been resumed meanwhile
        old = [run for run in old if run.name in confirmed]
    for run in old:
        _delete(cluster, cluster.storage(run.name))
    code = 0
    if jobs is not None or cluster.is_here:
        code = _delete_code(folders, folders.files.keys() - {run.name for run in old}, older_than)
    note(f"{counted(len(old), 'run')} deleted, and {counted(code, 'archive')} of code")
    return 0


def _list_old(runs: list[RunInfo]) -> None:
    """Print a table of the runs, or where it would be cut a line for each."""
    wide, shown = Screen(width=WIDTH), table(runs)
    if out.is_terminal and wide.measure(shown).maximum <= out.width:
        out.print(shown)
        return
    for run in runs:
        out.print(", ".join(filter(None, (run.name, run.state, ago(run)))))


def _old_runs(cluster: Cluster, older_than: float) -> tuple[Folders, list[Job] | None, list[RunInfo]]:
    """Return all folders, Ray's jobs, and the runs that ended `older_than` days ago, by the storage's clock."""
    folders, jobs = list_folders(cluster, cluster.storage("")), ask_head(cluster)
    runs = [run for run in folders.runs(jobs) if folders.files.get(run.name, {}).keys() & OF_RUNS]
    busy = _under_way(cluster, folders, jobs, runs)
    latest = folders.now - older_than * 86400
    ended = [run for run in runs if run.name not in busy and run.updated]
    return folders, jobs, [run for run in ended if datetime.fromisoformat(str(run.updated)).timestamp() < latest]


def _under_way(cluster: Cluster, folders: Folders, jobs: Sequence[Job] | None, runs: Sequence[RunInfo]) -> set[str]:
    """Return the names of the runs that a driver may still write to, by its job, its lock or its status."""
    of_jobs = under_way(jobs, folders.storage.uri)
    # A head of a stack that does not answer may have jobs; this machine without a head has none.
    busy = BUSY if jobs is not None or cluster.is_here else (*BUSY, *UNKNOWN)
    return {run.name for run in runs if run.name in of_jobs or run.state in busy or folders.is_locked(run.name)}


def _wait_for_scripts(storage: RunStorage) -> None:
    """Wait until the scripts of a driver that was killed, which have 30 s, write no more; ResourceError if they do."""
    from ray_on_ecs.run.process import scripts_lock, wait_for_end
    from ray_on_ecs.run.supervisor import GRACE_SECONDS, KILL_SECONDS

    lock = scripts_lock(storage.uri)
    if not lock.exists() or wait_for_end(lock, 0):
        return
    note(f"waiting up to {GRACE_SECONDS:.0f} s for the scripts of run {storage.run_name}, whose driver was killed")
    if not wait_for_end(lock, GRACE_SECONDS + KILL_SECONDS):
        raise ResourceError(f"run {storage.run_name} is not deleted, as its scripts have not ended; try again")


def _delete(cluster: Cluster, storage: RunStorage) -> None:
    """Delete a run's secrets and its folder; ResourceError if a part stays, which the same command deletes."""
    if cluster.is_here:
        _wait_for_scripts(storage)
    try:
        try:
            names = [item for item in secrets.earlier_items(storage.read_settings()) if "=" not in item]
        except UsageError:  # a document that is broken does not name a secret
            names = []
        if names:
            cluster.secrets_of(storage.uri).delete(names)
        for name in FIRST:
            storage.delete(name)
        storage.delete_folder()
    except OSError as cause:
        raise ResourceError(f"run {storage.run_name} can't be deleted ({one_line(cause)}); try again") from cause


def _delete_code(folders: Folders, remaining: Iterable[str], older_than: float) -> int:
    """Delete the stored code that is as old and that no run names; return how many archives that were."""
    from ray_on_ecs.run.code.archive import FOLDER

    storage = folders.storage
    try:
        listed = storage.listing(FOLDER).files
        with_settings = [name for name in remaining if layout.SETTINGS in folders.files.get(name, {})]
        needed = []
        for name in with_settings:
            with suppress(FileNotFoundError):  # the run has just been deleted
                # As text, which also a broken document is.
                needed.append(storage.sibling(name).read(layout.SETTINGS).decode(errors="replace"))
        unused = [
            name
            for name, archive in listed.items()
            if folders.now - archive.mtime_ns / 1e9 > older_than * 86400 and not any(name in code for code in needed)
        ]
        for name in unused:
            storage.delete(f"{FOLDER}/{name}")
    except OSError as cause:
        raise ResourceError(f"code that no run needs can't be deleted ({one_line(cause)}); try again") from cause
    return len(unused)
