"""`ray-on-ecs compare`: a table of the settings that differ and of the outcomes, and a picture of the metrics."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.completion import complete_run
from ray_on_ecs.cli.screen import Screen, note, out, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.totals import total_seconds, total_usd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from ray_on_ecs.storage.run_storage import RunStorage

PICTURE = "compare.png"
SUBPLOTS_BESIDE = 3
# Some scripts log a metric for each layer.
MOST_SUBPLOTS = 24
# Settings left out: the name heads the column, and the row `workers` has the number that trained.
LEFT_OUT = ("run_name", "num_workers")
# Of the SHA-256 in the URI of a script's code.
CODE_DIGITS = 12
MISSING = "-"
# The least room for a run's column: more runs than fit on a terminal go into tables below each other.
COLUMN_WIDTH = 16
# rich takes a pipe for 80 columns; programs want each row on one line.
PIPE_WIDTH = 1000

# Points: a step and a value.
Curve = list[tuple[int, float]]
# Each row's value of each run, by the names of the row and the run.
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's cells of the table, by their rows, and its curves by their metrics."""

    name: str
    settings: dict[str, Any]
    outcome: dict[str, Any]
    curves: Mapping[str, Curve]


@click.command("compare")
@click.argument("runs", metavar="RUN RUN...", nargs=-1, shell_complete=complete_run)
@click.option(
    "--picture", metavar="FILE", default=PICTURE, show_default=True, help="File for the curves: .png, .svg or .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@on_cluster
def command(cluster: Cluster, runs: tuple[str, ...], picture: str, as_json: bool) -> None:
    """Show where RUNs differ: settings, metrics, time and cost, and their curves in one picture."""
    names = list(dict.fromkeys(runs))
    if len(names) < 2:
        raise UsageError(f"RUN RUN...: give at least two runs; {cluster.command('runs')} lists them")
    compared = [read(find_run(cluster, name)) for name in names]
    settings = differing_rows({run.name: run.settings for run in compared})
    outcomes = rows_of({run.name: run.outcome for run in compared})
    figure = draw(compared)
    file = _write(figure, Path(picture).expanduser()) if figure else None
    if as_json:
        print_json({"runs": names, "settings": settings, "outcomes": outcomes, "picture": file and str(file)})
        return
    _print_tables(names, settings, outcomes)
    if file:
        out.print(f"curves: {file}")
    else:
        note("no picture: the runs have no metrics yet")


def read(storage: RunStorage) -> Run:
    """Read the documents of a run; one that is missing counts as empty.

    Raises:
        UsageError: A document is broken.
        ResourceError: The folder can't be read.
    """
    from ray_on_ecs.tracking.records import read_records

    name = storage.run_name
    try:
        status, result = (storage.read_json(document) or {} for document in (layout.STATUS, layout.RESULT))
        curves = _curves(read_records(storage))
        settings = _settings(storage.read_settings(), status, result)
        run = Run(name=name, settings=settings, outcome=_outcome(status, result, curves), curves=curves)
        for row, value in (run.settings | run.outcome).items():
            _text(row, value)  # raises for a value that can't be shown
        return run
    except OSError as cause:
        raise ResourceError(f"run {name} can't be read ({one_line(cause)})") from cause
    except Exception as cause:  # others who can write to the storage may have written the documents
        reason = one_line(f"{type(cause).__name__}: {cause}")
        raise UsageError(f"run {name} has a broken document ({reason})") from cause


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the points of each metric; a value that was not finite is null, and no point."""
    curves: dict[str, Curve] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                curves.setdefault(name, []).append((operator.index(record["step"]), value))
    return curves


def _settings(settings: Mapping[str, Any], status: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    hardware = result.get("hardware") or status  # the result of a Ray program does not name hardware
    instances = (result.get("cost") or status).get("instances") or []
    kinds = [f"{instance['instance_type']} {instance['market']}" for instance in instances]
    compared = {name: _flat(value) for name, value in settings.items() if name not in LEFT_OUT}
    if compared.get("code"):
        compared["code"] = PurePath(compared["code"]).name[:CODE_DIGITS]
    return {**compared, "workers": hardware.get("workers"), "instances": ", ".join(kinds) or None}


def _flat(value: Any) -> Any:
    """Return a setting without objects in it, and without lists in a list."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _outcome(status: Mapping[str, Any], result: Mapping[str, Any], curves: Mapping[str, Curve]) -> dict[str, Any]:
    last_steps = [curve[-1][0] for curve in curves.values()]
    return {
        "state": "finished" if result else str(status.get("state", "unfinished")),
        # A command that resumes a run and logs nothing leaves null in the status.
        "steps": status.get("step") or max(last_steps, default=None),
        "duration": total_seconds(status, result),
        "cost in USD": total_usd(status, result),
        **{f"last {metric}": curve[-1][1] for metric, curve in curves.items()},
    }


def rows_of(columns: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return the rows of columns, None in a column that lacks one; rows without any value are left out."""
    rows: Rows = {}
    for row in dict.fromkeys(chain.from_iterable(columns.values())):
        values = {name: column.get(row) for name, column in columns.items()}
        if set(map(type, values.values())) != {type(None)}:
            rows[row] = values
    return rows


def differing_rows(columns: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return the rows whose values differ."""
    differing: Rows = {}
    for row, values in rows_of(columns).items():
        first, *others = values.values()
        if any(value != first for value in others):
            differing[row] = values
    return differing


def _print_tables(names: Sequence[str], settings: Rows, outcomes: Rows) -> None:
    """Print the table, in parts if it is wider than the terminal."""
    console = Screen()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    beside = max(console.width // COLUMN_WIDTH - 1, 1)
    for first in range(0, len(names), beside):
        console.print(_table(names[first : first + beside], settings, outcomes))
        console.print()


def _table(names: Sequence[str], settings: Rows, outcomes: Rows) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("run", *names):
        table.add_column(heading, overflow="fold")
    for row, values in (settings | outcomes).items():
        table.add_row(row, *(_text(row, values[name]) for name in names))
    return table


def _text(row: str, value: Any) -> str:
    if value is None:
        return MISSING
    if row == "duration":
        return str(timedelta(seconds=round(value)))
    if row == "cost in USD":
        return f"{value:.2f}"
    if row == "steps":
        return f"{value:,}"
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def draw(runs: Sequence[Run]) -> Figure | None:
    """Return a subplot for each metric, with a colour for each run; None if there are no metrics."""
    from matplotlib.figure import Figure  # takes a second to import

    metrics = list(dict.fromkeys(chain.from_iterable(run.curves for run in runs)))
    if not metrics:
        return None
    if len(metrics) > MOST_SUBPLOTS:
        note(f"the picture has {MOST_SUBPLOTS} of {len(metrics)} metrics")
        metrics = metrics[:MOST_SUBPLOTS]
    columns = min(len(metrics), SUBPLOTS_BESIDE)
    rows = -(-len(metrics) // columns)
    size = (max(4.6 * columns, 6.5), 3.7 * rows + 0.22 * len(runs))
    figure = Figure(figsize=size, layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        _plot(figure.add_subplot(rows, columns, number), metric, runs)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", frameon=False)
    return figure


def _plot(axes: Axes, metric: str, runs: Sequence[Run]) -> None:
    """Plot a metric of all runs. A run that lacks it has a line without points, which the legend needs."""
    from matplotlib import rcParams
    from matplotlib.rcsetup import cycler

    # An eleventh run has the first of matplotlib's ten colours again, dashed.
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * rcParams["axes.prop_cycle"])
    for run in runs:
        curve = run.curves.get(metric, [])
        steps, values = [step for step, _ in curve], [value for _, value in curve]
        axes.plot(steps, values, label=run.name, marker=".", markersize=5)  # without a marker one point is invisible
    axes.set_title(metric, parse_math=False)
    axes.set(xlabel="step")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _write(figure: Figure, file: Path) -> Path:
    """Write the picture; return its path."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format=file.suffix.removeprefix(".") or "png", dpi=130)
    except (OSError, ValueError) as cause:
        raise UsageError(f"--picture: {file} can't be written ({one_line(cause)})") from cause
    return file
