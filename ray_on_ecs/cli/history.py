"""`ray-on-ecs history`: a page of all runs in the browser."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.fetch import FOLDER
from ray_on_ecs.cli.open import show_page
from ray_on_ecs.cli.runs import ask_head
from ray_on_ecs.cli.screen import note, notes, out, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import Folders, RunInfo, find_run, list_folders
from ray_on_ecs.errors import UsageError, counted, one_line
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from ray_on_ecs.cluster.history_rows import Row
    from ray_on_ecs.storage.run_storage import RunStorage

SUFFIX = ".html"
PAGE = f"{FOLDER}/history{SUFFIX}"


@click.command("history")
@click.argument("words", metavar="[RUN...] [FILE.html]", nargs=-1)
@click.option("--months", type=click.IntRange(min=1), metavar="N", help="Number of months, this one included (UTC).")
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Earliest start of a run (UTC).")
@click.option("--no-browser", is_flag=True, help="Only print where the page is.")
@click.option("--json", "as_json", is_flag=True, help="Print the path and the number of runs as JSON.")
@on_cluster
def command(
    cluster: Cluster,
    words: tuple[str, ...],
    months: int | None,
    since: datetime | None,
    no_browser: bool,
    as_json: bool,
) -> None:
    """Write one page of all runs and show it: a table, curves, different settings, and the cost by owner and month.

    The page (default: runs/history.html) needs no other file. It begins with the curves of each RUN, or of the newest
    runs.
    """
    from ray_on_ecs.tracking.history_page import render_history

    if months and since:
        raise UsageError("--months, --since: give one of them")
    *named, file = words if words and words[-1].endswith(SUFFIX) else (*words, PAGE)
    storage, page = cluster.storage(""), Path(file).expanduser().absolute()
    _check(page)
    for name in named:
        find_run(cluster, name)
    with notes.status("listing the runs"):
        folders = list_folders(cluster, storage)
        begin = _begin(datetime.fromtimestamp(folders.now, UTC), months, since)
        folders = folders if begin is None else folders.since(begin.timestamp(), named)
        runs = [run for run in folders.runs(ask_head(cluster)) if run.name in named or _is_since(run, begin)]
    rows = _read(folders, runs, named)
    html = render_history(
        rows,
        uri=cluster.storage_path,
        command=cluster.command("open RUN"),
        made=datetime.fromtimestamp(folders.now, UTC),
        since=begin,
        chosen=named,
        reports=_reports(storage, page, [run.name for run in runs]),
    )
    _write(page, html)
    if as_json:
        print_json({"page": str(page), "runs": len(rows)})
    else:
        out.print(str(page))
    if not no_browser:
        show_page(page)


def _check(page: Path) -> None:
    """Raise UsageError unless the page has a folder, and replaces at most another such page."""
    from ray_on_ecs.tracking.history_page import is_history

    if page != Path(PAGE).absolute() and not page.parent.is_dir():
        raise UsageError(f"{page.parent} is not a folder; make it, or give another FILE{SUFFIX}")
    if os.path.lexists(page) and not is_history(page):
        raise UsageError(f"{page} is not a page of this command; delete it, or give another FILE{SUFFIX}")


def _begin(now: datetime, months: int | None, since: datetime | None) -> datetime | None:
    """Return the earliest start of a run, if that is limited."""
    if since or not months:
        return since and since.replace(tzinfo=UTC)
    years, month = divmod(now.year * 12 + now.month - months, 12)
    return datetime(max(years, 1), month + 1, 1, tzinfo=UTC)


def _is_since(run: RunInfo, begin: datetime | None) -> bool:
    return begin is None or run.started is None or datetime.fromisoformat(run.started) >= begin


def _read(folders: Folders, runs: Sequence[RunInfo], named: Collection[str]) -> list[Row]:
    """Read the runs, with a bar on a terminal and a line about those that can't be read."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ray_on_ecs.cluster.history_rows import read_rows

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("reading the runs", total=len(runs))
        rows, errors = read_rows(folders, runs, named, lambda: bar.advance(task))
    for name, cause in list(errors.items())[:1]:
        note(f"{counted(len(errors), 'run')} without settings and curves, such as {name} ({one_line(cause)})")
    return rows


def _reports(storage: RunStorage, page: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the addresses of this user's reports, by the run's name: copies beside the page, or on a local storage.

    Another user of a shared storage could have written one that is not a report.
    """
    reports = {}
    for name in names:
        paths = [page.parent / name / layout.REPORT]
        if storage.is_local:
            paths.append(Path(storage.sibling(name).path(layout.REPORT)))
        if path := next(filter(_is_own, paths), None):
            reports[name] = quote(os.fsencode(os.path.relpath(path, page.parent)))
    return reports


def _is_own(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _write(page: Path, html: str) -> None:
    from ray_on_ecs.storage.disk import make_ignored

    try:
        if page == Path(PAGE).absolute():
            make_ignored(page.parent)
        page.unlink(missing_ok=True)  # perhaps a link, in a folder where others may write
        page.write_bytes(html.encode(errors="replace"))
    except OSError as cause:
        raise UsageError(f"{page} can't be written ({cause.strerror}); give another FILE{SUFFIX}") from cause
