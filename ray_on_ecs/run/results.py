"""Results of a script's run in addition to its own files: metrics, their plot, TensorBoard events, result.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.metrics import STEP
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from ray_on_ecs.tracking.cost import Cost
from ray_on_ecs.tracking.records import merge_records
from ray_on_ecs.tracking.results import png, run_times, versions
from ray_on_ecs.tracking.tensorboard import write_events
from ray_on_ecs.tracking.totals import Earlier

COLUMNS = 3
# Of the files that a Checkpointer exports into the run's folder.
WEIGHTS = ".safetensors"


def write_results(
    storage: RunStorage, config: RunConfig, summary: dict[str, Any], cost: Cost | None, earlier: Earlier
) -> dict[str, Any]:
    """Write the results of a run that has ended well.

    Args:
        storage: The run's folder.
        config: The run's settings.
        summary: The return value of rank 0: `hardware`, and `started_at`, when its script was started (Unix time).
        cost: Cost of its instances, if that is known.
        earlier: Time and cost of the commands before this one.

    Returns:
        The document written to `result.json`.

    Raises:
        OSError: A file could not be written.
    """
    records = merge_records(storage)
    files = {"report": layout.REPORT}
    snapshot = read_snapshot(storage)
    if snapshot.files:
        files["files"] = snapshot.folder
    names = metric_names(records)
    if names:
        storage.write(layout.CURVES, plot(records, names))
        storage.write(layout.EVENTS, event_file(records, names))
        files |= {"metrics": layout.METRICS, "curves": layout.CURVES, "events": layout.EVENTS}
    files |= {PurePath(name).stem: name for name in sorted(storage.file_sizes()) if _is_weights(name)}
    files |= {name: f"{name}/" for name in storage.folders("") if any(map(_is_weights, storage.file_sizes(name)))}
    document = {
        "run_name": config.run_name,
        "storage_path": storage.uri,
        "command": config.command,
        "metrics": records[-1] if records else None,
        "hardware": summary["hardware"],
        "versions": versions(),
        "times": run_times(summary["started_at"]),
        "cost": cost,
        "earlier": earlier,
        "config": config.to_dict(),
        "files": files,
    }
    storage.write_json(layout.RESULT, document)
    return document


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHTS)


def check_not_finished(storage: RunStorage) -> None:
    """Raise UsageError if a run has its results already, or its folder has another format."""
    settings = storage.read_json(layout.SETTINGS)
    if settings is not None and settings.get("format") != layout.FORMAT:
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was written by another version; give another --run-name"
        )
    if storage.exists(layout.RESULT):
        raise UsageError(
            f"--run-name: run {storage.run_name!r} is finished, results in {storage.uri}; to run it again give another "
            "--run-name, or delete that run (ray-on-ecs rm)"
        )


def metric_names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics, in the order in which they first appear."""
    return list(dict.fromkeys(name for record in records for name in record if name not in (STEP, "time")))


def plot(records: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return a PNG with a plot of each metric by step."""
    from matplotlib.figure import Figure  # takes a second: not before the end

    columns = min(len(names), COLUMNS)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid, names, strict=False):
        points = [record for record in records if record.get(name) is not None]
        axes.plot([record[STEP] for record in points], [record[name] for record in points], marker="o", markersize=3)
        axes.set(title=name, xlabel=STEP)
        axes.grid(alpha=0.3)
    return png(figure)


def event_file(records: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return a TensorBoard event file of the metrics by step."""
    return write_events(
        (name, record[name], record[STEP], record["time"])
        for record in records
        for name in names
        if record.get(name) is not None
    )
