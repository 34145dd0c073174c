"""Results of a run beside the files of its script: metrics, their plot, TensorBoard events, result.json."""

from __future__ import annotations

import fnmatch
import io
import logging
import platform
import runpy
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import psutil

import ray_on_ecs
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from ray_on_ecs.tracking.cost import Cost, Earlier
from ray_on_ecs.tracking.records import STEP, merge_records

logger = logging.getLogger(__name__)

COLUMNS = 3
MAX_PLOTS = 60  # a program of RLlib has hundreds of metrics
PACKAGES = ("torch", "torchvision", "ray", "numpy", "pyarrow")


def write_results(
    storage: RunStorage,
    config: RunConfig,
    code: Mapping[str, str],
    summary: dict[str, Any],
    cost: Cost | None,
    earlier: Earlier,
) -> dict[str, Any]:
    """Write the results of a run that has ended well; returns the document written to `result.json`.

    `code` is its archive and its commit; `summary` is the return value of `RunDriver.train`: `hardware`,
    and `started_at`, the start of its script (Unix time), with the run's `restarts`, `starts` and `pool`.
    """
    records = merge_records(storage)
    files = {"report": layout.REPORT}
    snapshot = read_snapshot(storage)
    if snapshot.files:
        files["files"] = snapshot.folder
    names = metric_names(records)
    if names:
        files["metrics"] = layout.METRICS
        drawn = (("curves", layout.CURVES, "matplotlib", plot), ("events", layout.EVENTS, "tensorboardX", event_file))
        for kind, name, package, draw in drawn:
            try:
                content = draw(records, names)
            except Exception as cause:  # of an absent or a broken package; the run itself has ended well
                logger.info(f"no {name} ({one_line(cause) or type(cause).__name__}); pip install --upgrade {package}")
                continue
            storage.write(name, content)
            files[kind] = name
    weights = "*.safetensors"  # that a Checkpointer exports into the run's folder, or into one below it
    files |= {PurePath(name).stem: name for name in fnmatch.filter(sorted(storage.file_sizes()), weights)}
    files |= {name: f"{name}/" for name in storage.folders("") if fnmatch.filter(storage.file_sizes(name), weights)}
    document = {
        "run_name": config.run_name,
        "storage_path": storage.uri,
        "command": config.command,
        "metrics": records[-1] if records else None,
        "hardware": summary["hardware"],
        "versions": _versions(),
        "times": run_times(summary["started_at"]),
        "restarts": summary.get("restarts", []),
        "starts": summary.get("starts", []),
        "cost": cost,
        "earlier": earlier,
        "config": asdict(config),
        "code": dict(code),
        "files": files,
    }
    document |= {key: summary[key] for key in ("pool", "pools", "slow", "waits") if key in summary}
    storage.write_json(layout.RESULT, document)
    return document


def check_not_finished(storage: RunStorage, rm: str = "") -> None:
    """Raise UsageError if a run has its results already; `rm` is the command that deletes it, if that is known."""
    if storage.exists(layout.RESULT):
        raise UsageError(
            f"--run-name: run {storage.run_name!r} is finished, results in {storage.uri}; to run it again give another "
            f"--run-name, or delete that run{f' ({rm})' if rm else ''}"
        )


def metric_names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics, in the order in which they first appear."""
    return list(dict.fromkeys(name for record in records for name in record if name not in (STEP, "time")))


def plot(records: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return a PNG with a plot of each metric by step, of the first ones."""
    from matplotlib.figure import Figure  # takes a second: not before the end

    names = names[:MAX_PLOTS]
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
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def event_file(records: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return the metrics by step as an event file, for `tensorboard --logdir FOLDER`."""
    with _without_torch():
        from tensorboardX import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for record in records:
                moment = datetime.fromisoformat(record["time"]).timestamp()
                for name in names:
                    if record.get(name) is not None:
                        writer.add_scalar(name, record[name], record[STEP], moment)
        [file] = Path(folder).iterdir()
        return file.read_bytes()


@contextmanager
def _without_torch() -> Generator[None]:
    """Let tensorboardX be imported without PyTorch, which it needs for tensors alone, and which takes a second."""
    modules: dict[str, Any] = sys.modules
    is_hidden = modules.setdefault("torch", None) is None
    try:
        yield
    finally:
        if is_hidden:
            del modules["torch"]


def _versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and the packages; None for what is not installed."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in PACKAGES}
    return {
        "ray_on_ecs": ray_on_ecs.__version__,
        "python": platform.python_version(),
        "cuda": _cuda(found["torch"]),
        **{name: package.version if package else None for name, package in found.items()},
    }


def _cuda(torch: metadata.Distribution | None) -> str | None:
    """Return the version of CUDA in torch's version.py: torch itself takes a second to import."""
    file = Path(str(torch.locate_file("torch/version.py"))) if torch else None
    return runpy.run_path(str(file)).get("cuda") if file and file.exists() else None


def run_times(script_start: float) -> dict[str, Any]:
    """Return the times of this command, from the start of its process; the script's start is in Unix time."""
    started = psutil.Process().create_time()
    finished = time.time()
    return {
        "started": _iso(started),
        "script_start": _iso(script_start),
        "finished": _iso(finished),
        "total_seconds": finished - started,
        "to_script_start_seconds": script_start - started,
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
