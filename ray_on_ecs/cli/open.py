"""`ray-on-ecs open`: a run's report in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.fetch import FOLDER
from ray_on_ecs.cli.local_copy import make_folder
from ray_on_ecs.cli.screen import note, out, print_json
from ray_on_ecs.cli.target import check_folder
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage


@click.command("open")
@click.argument("run")
@click.argument("folder", metavar="[DIR]", default=FOLDER)
@click.option("--no-browser", is_flag=True, help="Only print where the report is.")
@click.option("--json", "as_json", is_flag=True, help="Print the paths as JSON.")
@on_cluster
def command(cluster: Cluster, run: str, folder: str, no_browser: bool, as_json: bool) -> None:
    """Copy RUN's report to DIR/RUN (default: runs/RUN) and show it: results, curves, settings, the end of the log."""
    storage, target = find_run(cluster, run), Path(folder).expanduser().absolute() / run
    check_folder(target)
    report, curves = _copy(storage, target)
    if as_json:
        print_json({"run": run, "report": str(report), "curves": curves and str(curves)})
    else:
        out.print("\n".join(map(str, filter(None, (report, curves)))))
    if not no_browser:
        show_page(report)


def show_page(page: Path) -> None:
    """Open a file in the browser; a line without one."""
    # Only one with windows: a browser of the terminal would hide what is printed.
    has_windows = sys.platform == "darwin" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"}
    if not has_windows or not webbrowser.open(page.as_uri()):
        note(f"a browser was not found; open {page} in one")


def _copy(storage: RunStorage, folder: Path) -> tuple[Path, Path | None]:
    """Write the report and, if there are any, the curves into a folder; return their paths."""
    from ray_on_ecs.tracking.report import render_here

    report, curves = folder / layout.REPORT, folder / layout.CURVES
    try:
        page = render_here(storage)
        picture = storage.read(layout.CURVES) if storage.exists(layout.CURVES) else b""
    except OSError as cause:
        raise ResourceError(f"the report of run {storage.run_name} can't be copied ({one_line(cause)})") from cause
    try:
        make_folder(folder)
        report.unlink(missing_ok=True)  # perhaps a link, and this folder the storage, where others may write
        report.write_bytes(page)
        curves.unlink(missing_ok=True)  # may be of a run of this name on another cluster
        if picture.startswith(layout.PNG):
            curves.write_bytes(picture)
    except OSError as cause:
        raise UsageError(f"DIR: {folder} can't have the report ({one_line(cause)}); give another folder") from cause
    return report, curves if curves.exists() else None
