"""Lines of a run's log: its header, and at its end the results."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError, counted, one_line
from ray_on_ecs.run import limit
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import publish, read_snapshot
from ray_on_ecs.tracking.cost import cost_line, lines_after_run
from ray_on_ecs.tracking.records import STEP, read_records
from ray_on_ecs.tracking.report import NOT_FINITE
from ray_on_ecs.tracking.results import metric_names

logger = logging.getLogger(__name__)

MAX_METRICS = 20  # in the last line


def print_header(config: RunConfig, storage: RunStorage, allocation: WorkerAllocation | None) -> None:
    """Print the run, its script, its workers and the place of its results."""
    continued = ", continued with its files" if read_snapshot(storage).files else ""
    lines = {
        "run": f"{config.run_name}{continued}",
        "script": shlex.join(config.command),
        "workers": str(allocation) if allocation else "those that the Ray program starts",
        "results": storage.uri,
    }
    if limits := limit.describe(config):
        lines["limit"] = limits
    for name, value in lines.items():
        print(f"{name:<9}{value}", flush=True)


def publish_files(storage: RunStorage) -> None:
    """Bring the files of a run that has finished to their places, and print which were not kept."""
    try:
        snapshot = publish(storage)
        if snapshot.left_out:
            logger.info(f"not kept: {', '.join(snapshot.left_out)}")
    except (OSError, UsageError) as cause:
        logger.warning(f"files of the run are not in their places yet ({one_line(cause)})")


def print_summary(document: dict[str, Any], config: RunConfig, storage: RunStorage) -> None:
    """Print the time, the cost, the metrics and the files of a run that has finished."""
    metrics = [
        f"{name} {NOT_FINITE}" if value is None else f"{name} {value:g}"
        for name, value in (document["metrics"] or {}).items()
        if name != "time"
    ]
    line = f"finished in {document['times']['total_seconds']:.0f} s{cost_line(document['cost'])}"
    if len(metrics) > MAX_METRICS:
        metrics[MAX_METRICS:] = [f"{len(metrics) - MAX_METRICS} more in {layout.METRICS}"]
    if metrics:
        line += f": {', '.join(metrics)}"
    print(line)
    files: Sequence[str] = [layout.RESULT, *document["files"].values()]
    print(f"results in {document['storage_path']}: {', '.join(files)}", flush=True)
    with suppress(OSError, UsageError):  # the run has finished, and has its results
        _print_unmatched_metrics(config, storage)
        _print_failed_trials(storage)


def print_what_stays(config: RunConfig, hours: InstanceHours) -> None:
    """Print what runs on and costs after a run, however it ends; nothing outside a stack."""
    for line in lines_after_run(hours.most, then_stop=config.then_stop):
        print(line, flush=True)


def _print_unmatched_metrics(config: RunConfig, storage: RunStorage) -> None:
    """Print the metrics of --metric that matched no line of the output."""
    if not config.metric:
        return
    matched = {STEP, *metric_names(read_records(storage))}
    for metric in config.metric:
        if metric.partition("=")[0] not in matched:
            print(f"--metric {shlex.quote(metric)}: no line of the output matched", flush=True)


def _print_failed_trials(storage: RunStorage) -> None:
    """Print how many trials of Ray Tune have failed in a program that has ended well, if any have."""
    trials = storage.read_json(layout.TRIALS) or {}
    failed = sum(trial["status"] == "ERROR" for trial in trials.values())
    if failed:
        where = f"{layout.TRIALS} says which, and error.txt in a trial's folder why"
        print(f"{failed} of {counted(len(trials), 'trial')} failed: {where}", flush=True)
