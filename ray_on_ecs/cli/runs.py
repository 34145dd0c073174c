"""`ray-on-ecs runs`: a table of the runs, from their folders and the jobs of the head or of this machine."""

from __future__ import annotations

import click
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import Screen, note, out, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import Job, RunInfo, list_folders
from ray_on_ecs.errors import TrainingError, counted
from ray_on_ecs.tracking.end import at_end, duration, steps
from ray_on_ecs.tracking.places import in_words

LIMIT = 20
# rich cuts all columns of a table that is wider than its console, and takes a pipe for one of 80 columns.
WIDTH = 500
# In a narrow terminal names are cut down to this; where it is narrower still, it wraps the rows.
SHORTEST_NAME = 12
COLOURS = {
    "finished": "green",
    "training": "bold cyan",
    "waiting": "yellow",
    "queued": "yellow",
    "starting": "yellow",
    "interrupted": "magenta",
    "limit": "magenta",
    "failed": "red",
    "lost": "red",
    "unreadable": "red",
}
DAY = 86400.0
# Up to these limits a time is shown in this unit: 119 s, 119 min, 47 h.
UNITS = ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (2 * DAY, 3600.0, "h"))


@click.command("runs")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=LIMIT,
    show_default=True,
    help="Number of runs to list, the newest first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
@on_cluster
def command(cluster: Cluster, limit: int, as_json: bool) -> None:
    """List runs with their state, progress and cost."""
    storage = cluster.storage("")
    runs = list_folders(cluster, storage).runs(ask_head(cluster), limit + 1)
    if as_json:
        print_json(runs[:limit])
    elif not runs:
        note(f"no runs in {cluster.storage_path} yet; {cluster.command('run')} starts one")
    else:
        if cluster.is_here:
            note(f"runs in {cluster.storage_path}:")
        wide = Screen(width=WIDTH)
        shown = table(runs[:limit])
        if wide.is_terminal and wide.measure(shown).maximum > out.width:  # shorter texts, and names are cut
            shown = table(runs[:limit], is_narrow=True)
            if (excess := wide.measure(shown).maximum - out.width) > 0:
                longest = max(len(run.name) for run in runs[:limit])
                shown = table(runs[:limit], max(longest - excess, SHORTEST_NAME), is_narrow=True)
        wide.print(shown)
    if len(runs) > limit:
        note(f"more runs exist; --limit {2 * limit} lists them")


def table(runs: list[RunInfo], longest_name: int = WIDTH, *, is_narrow: bool = False) -> Table:
    """Return a table with a row for each run."""
    columns: dict[str, list[str | Text]] = {
        "run": [Text(_cut(run.name, longest_name), Style(link=run.url)) for run in runs],
        "state": [Text(run.state, COLOURS.get(run.state, "default")) for run in runs],
        "owner": [run.owner or "" for run in runs],
        "pool": [", ".join(run.pools or ()) if is_narrow else in_words(run) for run in runs],
        "progress": [_progress(run, longest_name, is_narrow=is_narrow) for run in runs],
        "loss": [_loss(run.loss) for run in runs],
        "started": [ago(run) for run in runs],
        "cost": [_cost(run, is_narrow=is_narrow) for run in runs],
    }
    if len({run.owner for run in runs if run.owner}) < 2:
        del columns["owner"]
    if len({in_words(run) for run in runs} - {""}) < 2:  # in one pool and zone all rows would be alike
        del columns["pool"]
    if not any(columns["cost"]):  # a run on this machine has none
        del columns["cost"]
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in columns:
        is_word = heading in ("run", "state", "owner", "pool")
        shown.add_column(heading, justify="left" if is_word else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    return shown


def _cut(name: str, longest: int) -> str:
    """Return a name of at most this length: its beginning and its end, which distinguish runs."""
    if len(name) <= longest:
        return name
    end = longest // 2
    return f"{name[: longest - end - 1]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def ask_head(cluster: Cluster) -> list[Job] | None:
    """Return the jobs, or None, with a line, if the head's state can't be read."""
    try:
        return cluster.jobs(note).list_jobs()
    except TrainingError as cause:
        note(f"run states may be stale, and requested runs are not shown ({cause})")
        return None


def ago(run: RunInfo) -> str:
    """Return the time since the start of a run, for people."""
    seconds = run.started_seconds_ago
    if run.started is None or seconds is None:
        return ""
    for limit, unit, name in UNITS:
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / DAY:.0f} days ago" if seconds < 60 * DAY else run.started[:10]


def _progress(run: RunInfo, longest_name: int, *, is_narrow: bool) -> str:
    end, text = run.end, ""
    if run.state == "queued" and run.behind:
        text = f"behind {_cut(run.behind, longest_name)}" + (f" in pool {run.line}" if run.line else "")
    elif end and is_narrow and end.total and end.seconds_left is not None:
        text = f"{100 * end.step // end.total}%, {duration(end.seconds_left)} left"
    elif end:
        text = steps(end)
    return ", ".join(filter(None, (text, counted(run.restarts, "restart") if run.restarts else "")))


def _cost(run: RunInfo, *, is_narrow: bool) -> str:
    if run.cost_usd is None:
        return ""
    return f"{run.cost_usd:.2f} USD{at_end(run.end) if run.end and not is_narrow else ''}"


def _loss(loss: float | None) -> str:
    if loss is None:
        return ""
    return f"{loss:.4f}" if loss == 0 or 0.001 <= abs(loss) < 10000 else f"{loss:.2e}"
