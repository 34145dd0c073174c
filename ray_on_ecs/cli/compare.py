"""`ray-on-ecs compare`: where runs differ in settings and outcome, and their curves in one picture."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ray_on_ecs.cli.screen import note, out, print_json
from ray_on_ecs.cluster.clusters import Cluster, on_cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.tracking import layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from ray_on_ecs.tracking.storage import RunStorage

PICTURE = "compare.png"
COLUMNS = 3
MOST_SUBPLOTS = 24
MARKED_POINTS = 40
# What the names of metrics begin with, and whether that is of the training or of a test.
PARTS = {"train": "train", "training": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
STYLES: dict[str, Any] = {"train": "dashed", "test": "solid", "": "solid"}
# What an epoch of a recipe has beside its qualities.
NO_QUALITIES = ("seconds", "samples")
# Words at the end of a metric's name that say which of its values is the best.
LOWER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer")
HIGHER = ("accuracy", "acc", "f1", "auc", "score", "bleu", "iou", "reward")
MISSING = "-"


class Curve(NamedTuple):
    """A metric of a run.

    Attributes:
        quality: What it measures: its name without the part.
        part: `train`, `test`, or nothing where the name doesn't say.
    """

    quality: str
    part: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the folder of a run holds; empty where it lacks something.

    Attributes:
        name: The run.
        settings: The settings.
        metrics: A document for each epoch, or for each step at which a script has logged some.
        result: `result.json`.
        status: `status.json`.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def is_script(self) -> bool:
        """Whether it is that of a script, which has steps and no epochs."""
        return "command" in self.settings

    @cached_property
    def curves(self) -> dict[Curve, str]:
        """The metrics that can be compared, and their names in the documents."""
        names = dict.fromkeys(name for each in self.metrics for name in each if name not in ("step", "time"))
        if not self.is_script:
            names = dict.fromkeys(name for name in names if _is_quality(name))
        found: dict[Curve, str] = {}
        for name in names:
            first, *rest = re.split("[_/]", name, maxsplit=1)
            curve = Curve(rest[0], PARTS[first]) if rest and first in PARTS else Curve(name, "")
            found[curve if curve not in found else Curve(name, "")] = name
        return {_beside_test(curve, found): name for curve, name in found.items()}

    def points(self, curve: Curve, *, by_epoch: bool) -> list[tuple[float, float]]:
        """Return a metric's numbers by the epoch, counted from 1, or by the step that they belong to."""
        found, steps = [], 0
        for each in self.metrics:
            steps = each["step"] if self.is_script else steps + each["steps"]
            value = _number(each.get(self.curves.get(curve, "")))
            if value is not None:
                found.append((each["epoch"] + 1 if by_epoch else steps, value))
        return found


@click.command("compare")
@click.argument("runs", metavar="RUN RUN...", nargs=-1)
@click.option("--picture", metavar="FILE", default=PICTURE, show_default=True, help="The curves: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
@on_cluster
def command(cluster: Cluster, runs: tuple[str, ...], picture: str, as_json: bool) -> None:
    """Show where RUNs differ: settings, metrics, time and cost, and their curves in one picture."""
    if len(set(runs)) < 2:
        raise UsageError("RUN RUN...: give two runs or more; ray-on-ecs runs lists them")
    found = [read(find_run(cluster, name)) for name in dict.fromkeys(runs)]
    differing, equal, others = compare_settings(found)
    results = outcomes(found)
    file = _write(draw(found), Path(picture).expanduser())
    if as_json:
        names = [run.name for run in found]
        print_json(
            {
                "runs": names,
                "settings": {row: dict(zip(names, cells, strict=True)) for row, cells in differing.items()},
                "equal_settings": equal,
                "outcomes": {row: dict(zip(names, cells, strict=True)) for row, cells in results.items()},
                "picture": file and str(file),
            }
        )
        return
    out.print(_table("settings", found, differing))
    beside = f"; {others} are settings of some of the runs alone" if others else ""
    out.print(f"{equal} settings are equal{beside}\n", style="dim")
    out.print(_table("outcome", found, results))
    if file:
        out.print(f"\ncurves: {file}", markup=False)
    else:
        note("no picture: the runs have no metrics in common yet")


def read(storage: RunStorage) -> Run:
    """Read what is compared of a run.

    Raises:
        UsageError: A document is broken.
        ResourceError: The folder can't be read.
    """
    from ray_on_ecs.tracking.records import read_records

    try:
        settings = (storage.read_json(layout.SETTINGS) or {}).get("settings", {})
        return Run(
            name=storage.run_name,
            settings=settings,
            metrics=read_records(storage),
            result=storage.read_json(layout.RESULT) or {},
            status=storage.read_json(layout.STATUS) or {},
        )
    except (AttributeError, ValueError) as cause:
        raise UsageError(f"run {storage.run_name} has a broken document ({one_line(cause)})") from cause
    except OSError as cause:
        raise ResourceError(f"run {storage.run_name} can't be read ({one_line(cause)})") from cause


def compare_settings(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], int, int]:
    """Return the settings that differ with each run's value, and how many are equal, or not of all runs.

    A setting that only some runs have differs, as between recipes; between recipes and scripts all but `command` are
    left out.
    """
    flat = [{**_flat(run.settings), "run_name": None} for run in runs]
    is_mixed = len({run.is_script for run in runs}) > 1
    differing: dict[str, list[Any]] = (
        {"kind": ["script" if run.is_script else "recipe" for run in runs]} if is_mixed else {}
    )
    equal = others = 0
    for name in dict.fromkeys(name for each in flat for name in each if name != "run_name"):
        values = [each.get(name) for each in flat]
        if is_mixed and name != "command" and not all(name in each for each in flat):
            others += 1
        elif all(value == values[0] for value in values):
            equal += 1
        else:
            differing[name] = values
    return differing, equal, others


def outcomes(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the rows of the table of outcomes: each run's values, None where there is none."""
    rows: dict[str, list[Any]] = {
        "state": [_state(run) for run in runs],
        "workers": [_first(run.result.get("hardware"), "workers", run.status.get("workers")) for run in runs],
        "epochs": [None if run.is_script else len(run.metrics) for run in runs],
        "steps": [_steps(run) for run in runs],
    }
    for curve in _shared(runs):
        values = [[value for _, value in run.points(curve, by_epoch=False)] for run in runs]
        label = _label(runs, curve)
        rows[f"final {label}"] = [each[-1] if each else None for each in values]
        choose = _best(curve.quality)
        if choose and curve.part != "train":
            rows[f"best {label}"] = [choose(each) if each else None for each in values]
    rows["training seconds"] = [_sum(run, "train_seconds") for run in runs]
    rows["total seconds"] = [_first(run.result.get("times"), "total_seconds", None) for run in runs]
    rows["samples/s"] = [_median(run, "samples_per_second") for run in runs]
    rows["cost in USD"] = [_first(run.result.get("cost"), "usd", run.status.get("cost_usd")) for run in runs]
    return {name: cells for name, cells in rows.items() if any(cell is not None for cell in cells)}


def draw(runs: Sequence[Run]) -> Figure | None:
    """Return a subplot for each quality, with a colour for each run; None if there is nothing to draw."""
    curves = [each for each in _shared(runs) if any(run.points(each, by_epoch=False) for run in runs)]
    qualities = list(dict.fromkeys(each.quality for each in curves))
    if not qualities:
        return None
    if len(qualities) > MOST_SUBPLOTS:
        note(f"the picture has {MOST_SUBPLOTS} of {len(qualities)} metrics")
        qualities = qualities[:MOST_SUBPLOTS]
    colours = _colours(len(runs))
    figure = _empty_figure(runs, colours, len(qualities))
    for axes, quality in zip(figure.axes, qualities, strict=True):
        _plot(axes, [each for each in curves if each.quality == quality], runs, colours)
    parts = {each.part for each in curves} - {""}
    if len(parts) > 1:
        figure.axes[0].legend(handles=[_sample("gray", part, STYLES[part]) for part in sorted(parts, reverse=True)])
    return figure


def _empty_figure(runs: Sequence[Run], colours: Sequence[Any], subplots: int) -> Figure:
    """Return a figure with so many subplots and, below them, the names of the runs."""
    from matplotlib.figure import Figure

    columns = min(subplots, COLUMNS)
    rows = -(-subplots // columns)
    width = max(4.6 * columns, 6.5)
    names_beside = max(1, int(11 * width / (max(len(run.name) for run in runs) + 8)))
    figure = Figure(figsize=(width, 3.7 * rows + 0.25 * -(-len(runs) // names_beside)), layout="constrained")
    for axes in list(figure.subplots(rows, columns, squeeze=False).flat)[subplots:]:
        axes.remove()
    samples = [_sample(colour, run.name) for run, colour in zip(runs, colours, strict=True)]
    figure.legend(handles=samples, loc="outside lower center", ncols=names_beside, frameon=False)
    return figure


def _plot(axes: Any, curves: Sequence[Curve], runs: Sequence[Run], colours: Sequence[Any]) -> None:
    """Plot the curves of a quality: solid on the test set, dashed and hollow on the training set."""
    by_epoch = not any(run.is_script for run in runs)
    for run, colour in zip(runs, colours, strict=True):
        for curve in curves:
            if not (points := run.points(curve, by_epoch=by_epoch)):
                continue
            look = {"color": colour, "linestyle": STYLES[curve.part], "linewidth": 1.5}
            if len(points) <= MARKED_POINTS:
                look |= {"marker": "o", "markersize": 4}
                look |= {"markerfacecolor": "white"} if curve.part == "train" else {}
            axes.plot(*zip(*points, strict=True), **look, label=f"{run.name}: {_label([run], curve)}")
    axes.set(title=curves[0].quality.replace("_", " "), xlabel="epoch" if by_epoch else "step")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _sample(colour: Any, label: str, style: Any = "solid") -> Any:
    """Return a line of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, label=label)


def _shared(runs: Sequence[Run]) -> list[Curve]:
    """Return the metrics to compare: of runs of both kinds those whose quality several have, else all."""
    found = list(dict.fromkeys(curve for run in runs for curve in run.curves))
    if len({run.is_script for run in runs}) == 1:
        return found
    owners = [{curve.quality for curve in run.curves} for run in runs]
    return [curve for curve in found if sum(curve.quality in each for each in owners) > 1]


def _is_quality(name: str) -> bool:
    part, _, quality = name.partition("_")
    return part in ("train", "test") and quality not in NO_QUALITIES


def _beside_test(curve: Curve, found: Mapping[Curve, str]) -> Curve:
    """Return the curve; a `loss` beside a `val_loss` is that of the training."""
    train, test = curve._replace(part="train"), curve._replace(part="test")
    return train if not curve.part and test in found and train not in found else curve


def _label(runs: Sequence[Run], curve: Curve) -> str:
    """Return the runs' own name of a metric, unless they call it differently."""
    names = {run.curves[curve] for run in runs if curve in run.curves}
    return (names.pop() if len(names) == 1 else f"{curve.part} {curve.quality}".strip()).replace("_", " ")


def _colours(number: int) -> list[Any]:
    from matplotlib import colormaps

    if number <= 10:
        return [colormaps["tab10"](index) for index in range(number)]
    return [colormaps["turbo"](index / (number - 1)) for index in range(number)]


def _write(figure: Figure | None, file: Path) -> Path | None:
    """Write the picture; return its path, or None if there is none."""
    if figure is None:
        return None
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=file.suffix.removeprefix(".") or "png", dpi=130)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture.getvalue())
    except (OSError, ValueError) as cause:
        raise UsageError(f"--picture: {file} can't be written ({one_line(cause)})") from cause
    return file


def _table(title: str, runs: Sequence[Run], rows: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table with a column for each run; the best value of a metric is green."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column(title)
    for run in runs:
        shown.add_column(escape(run.name), overflow="fold", justify="right" if title == "outcome" else "left")
    for name, cells in rows.items():
        choose = _best(name) if title == "outcome" else None
        numbers = [cell for cell in cells if cell is not None]
        best = choose(numbers) if choose and len(set(numbers)) > 1 else None
        texts = [escape(_cell(name, cell)) for cell in cells]
        marked = [
            f"[green]{text}[/]" if best is not None and cell == best else text
            for text, cell in zip(texts, cells, strict=True)
        ]
        shown.add_row(escape(name), *marked)
    return shown


def _cell(row: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and row == "steps" else str(value)
    if row.startswith(("final", "best")):
        return f"{value:.4f}" if 0.001 <= abs(value) < 10000 or value == 0 else f"{value:.3e}"
    if row.startswith("cost"):
        return f"{value:.2f}"
    return f"{value:,.0f}" if row.endswith("/s") else f"{value:,.1f}" if "seconds" in row else f"{value:g}"


def _best(name: str) -> Any:
    """Return `min` or `max`, whichever chooses the best value of a metric, or None if its name doesn't say."""
    last = re.split("[ _/]", name.lower())[-1]
    return min if last in LOWER else max if last in HIGHER else None


def _state(run: Run) -> str:
    return "finished" if run.result else str(run.status.get("state", "unfinished"))


def _steps(run: Run) -> int | None:
    if run.is_script:
        return run.metrics[-1]["step"] if run.metrics else None
    return sum(each["steps"] for each in run.metrics)


def _sum(run: Run, name: str) -> float | None:
    values = [each[name] for each in run.metrics if name in each]
    return sum(values) if values and not run.is_script else None


def _median(run: Run, name: str) -> float | None:
    values = [value for each in run.metrics if (value := _number(each.get(name))) is not None]
    return median(values) if values else None


def _first(document: Mapping[str, Any] | None, name: str, other: Any) -> Any:
    """Return a value of a document that may not be there, or else another one."""
    return (document or {}).get(name, other)


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a document by their path in it, joined by dots."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
