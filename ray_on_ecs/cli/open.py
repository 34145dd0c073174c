"""`ray-on-ecs open`: a run's report in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.fetch import FOLDER
from ray_on_ecs.cli.local_copy import make_folder
from ray_on_ecs.cli.screen import note, out, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from ray_on_ecs.cluster.stack import Stack
    from ray_on_ecs.storage.run_storage import RunStorage

# AWS's console by the beginning of the region's name; elsewhere it is CONSOLE.
CONSOLES = {"us-gov-": "console.amazonaws-us-gov.com", "cn-": "console.amazonaws.cn"}
CONSOLE = "console.aws.amazon.com"


@click.command("open")
@click.argument("run")
@click.argument("folder", metavar="[DIR]", default=FOLDER)
@click.option("--no-browser", is_flag=True, help="Only print where the report is.")
@click.option("--cloudwatch", is_flag=True, help="Open the stack's CloudWatch dashboard, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the paths and the address as JSON.")
@on_cluster
def command(cluster: Cluster, run: str, folder: str, no_browser: bool, cloudwatch: bool, as_json: bool) -> None:
    """Copy RUN's report to DIR/RUN (default: runs/RUN) and show it: results, curves, settings, the end of the log."""
    address = dashboard(cluster.stack) if cluster.stack else None
    if cloudwatch and address is None:
        raise UsageError("--cloudwatch: only a stack has a dashboard there; give --stack or --outputs")
    report, curves = _copy(find_run(cluster, run), Path(folder).absolute() / run)
    if as_json:
        print_json({"run": run, "report": str(report), "curves": curves and str(curves), "cloudwatch": address})
    else:
        out.print("\n".join(map(str, filter(None, (report, curves, address)))))
    if not no_browser:
        _show([report.as_uri(), *([address] if cloudwatch and address else [])])


def dashboard(stack: Stack) -> str:
    """Return the address of a stack's CloudWatch dashboard."""
    host = next((host for start, host in CONSOLES.items() if stack.region.startswith(start)), CONSOLE)
    name = quote(stack.metrics_dashboard, safe="")
    return f"https://{stack.region}.{host}/cloudwatch/home?region={stack.region}#dashboards/dashboard/{name}"


def _copy(storage: RunStorage, folder: Path) -> tuple[Path, Path | None]:
    """Write the report and, if there are any, the curves into a folder; return their paths."""
    from ray_on_ecs.tracking.report import render_here

    report, curves = folder / layout.REPORT, folder / layout.CURVES
    try:
        page = render_here(storage)
        picture = storage.read(layout.CURVES) if storage.exists(layout.CURVES) else b""
        make_folder(folder)
        report.unlink(missing_ok=True)  # perhaps a link, and this folder the storage, where others may write
        report.write_bytes(page)
        curves.unlink(missing_ok=True)  # may be of a run of this name on another cluster
        if picture.startswith(layout.PNG):
            curves.write_bytes(picture)
    except OSError as cause:
        raise ResourceError(f"the report of run {storage.run_name} can't be copied ({one_line(cause)})") from cause
    return report, curves if curves.exists() else None


def _show(addresses: list[str]) -> None:
    """Open addresses in the browser, if there is one with windows: one of the terminal would hide what is printed."""
    has_windows = sys.platform in ("darwin", "win32") or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"}
    if not has_windows or not all(webbrowser.open(address) for address in addresses):
        note("no browser found; open the file in one")
