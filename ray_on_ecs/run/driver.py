"""A run of a user's script from the command to the result."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError, counted, one_line
from ray_on_ecs.run import inputs, ray_cluster
from ray_on_ecs.run.admission import Admission
from ray_on_ecs.run.attempts import Attempts, TrainFunction, wait_for_workers
from ray_on_ecs.run.failure_policy import Mark
from ray_on_ecs.run.files.newest import newest_stored
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.program import resources as program_resources
from ray_on_ecs.run.program.driver import run_program
from ray_on_ecs.run.ray_cluster import WorkerAllocation
from ray_on_ecs.run.ray_private import CHANGE_FOLDER, PREEMPTION_WATCHER, draining_nodes
from ray_on_ecs.run.script_group import Decider, ScriptGroup
from ray_on_ecs.run.worker import Settings, run_script
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import publish, read_snapshot
from ray_on_ecs.tracking.cost import cost_line, cost_of
from ray_on_ecs.tracking.records import STEP, read_records
from ray_on_ecs.tracking.results import metric_names, write_results
from ray_on_ecs.tracking.run_actor import create_run_actor
from ray_on_ecs.tracking.run_monitor import RunMonitor

logger = logging.getLogger(__name__)

# The workers of a Ray program may wait for those before them, also without a --worker-timeout.
MIN_WAIT_SECONDS = 30.0


def run(admission: Admission) -> dict[str, Any]:
    """Run a script on every worker, and leave the results in the run's folder; return `result.json`.

    Raises:
        UsageError: A setting, the script or a file that it needs can't be used.
        ResourceError: The cluster lacks room for the workers.
        TrainingError: The script failed; its files are kept, and `error.json` has the cause.
    """
    config, storage, record = admission.document.config, admission.document.storage, admission.record
    sources = {name: inputs.resolve(name, source, storage) for name, source in config.inputs.items()}
    os.environ[CHANGE_FOLDER] = "0"  # the workers stay where Ray starts them
    os.environ[PREEMPTION_WATCHER] = "0"  # the driver itself looks at the nodes that drain
    with ray_cluster.connected():
        allocation = None if config.driver else wait_for_workers(config, record)
        is_one_node = ray_cluster.is_one_node()
        if allocation:
            config = config.with_workers(allocation.num_workers)
        storage.delete(layout.ERROR)
        _print_header(config, storage, allocation)
        actor = create_run_actor()
        monitor = RunMonitor(actor)
        settings: Settings = {
            "config": config,
            "storage": storage,
            "run_actor": actor,
            "threads": allocation.cpus_per_worker if allocation else 0,
            "use_gpu": allocation is not None and allocation.use_gpu,
            "code": admission.document.code,
            "is_one_node": is_one_node,
            "run_id": admission.document.id,
            "inputs": sources,
        }

        def mark() -> Mark:
            step = monitor.progress.step if monitor.progress else None
            newest = newest_stored(config, storage)
            return Mark(step or None, newest[1].timestamp() if newest else None)

        def newest_checkpoint() -> str | None:
            newest = newest_stored(config, storage)
            if newest is None:
                return None
            name, written_at = newest
            return f"{name} of {written_at.isoformat(timespec='milliseconds')}"

        def scripts(decider: Decider) -> ScriptGroup:
            return ScriptGroup(actor, config, decider, draining_nodes, admission.document.code.left_out)

        function = run_program if config.driver else run_script
        attempts = Attempts(
            TrainFunction(function, settings, mark, newest_checkpoint, scripts),
            config,
            storage,
            allocation,
            monitor,
            record,
            InstanceHours(program_resources.instances) if config.driver else InstanceHours(),
            wait_seconds=max(config.worker_timeout, MIN_WAIT_SECONDS),
        )
        summary = attempts.fit()
        _publish(storage)
        cost = cost_of(attempts.instance_hours.by_kind)
        code = admission.document.code
        of_code = {"archive": code.archive, **code.git}
        document = write_results(storage, config, of_code, summary, cost, record.earlier)
        _print_summary(document)
        with suppress(OSError, UsageError):  # the run has finished, and has its results
            _print_unmatched_metrics(config, storage)
            if config.driver:
                _print_failed_trials(storage)
    return document


def _publish(storage: RunStorage) -> None:
    """Bring the files of a run that has finished to their places, and print which were not kept."""
    try:
        snapshot = publish(storage)
        if snapshot.left_out:
            logger.info(f"not kept: {', '.join(snapshot.left_out)}")
    except (OSError, UsageError) as cause:
        logger.warning(f"files of the run are not in their places yet ({one_line(cause)})")


def _print_header(config: RunConfig, storage: RunStorage, allocation: WorkerAllocation | None) -> None:
    continued = ", continued with its files" if read_snapshot(storage).files else ""
    lines = {
        "run": f"{config.run_name}{continued}",
        "script": " ".join(config.command),
        "workers": str(allocation) if allocation else "those that the Ray program starts",
        "results": storage.uri,
    }
    for name, value in lines.items():
        print(f"{name:<9}{value}", flush=True)


def _print_summary(document: dict[str, Any]) -> None:
    metrics = [
        f"{name} none" if value is None else f"{name} {value:g}"
        for name, value in (document["metrics"] or {}).items()
        if name != "time"
    ]
    line = f"finished in {document['times']['total_seconds']:.0f} s{cost_line(document['cost'])}"
    if metrics:
        line += f": {', '.join(metrics)}"
    print(line)
    files: Sequence[str] = [layout.RESULT, *document["files"].values()]
    print(f"results in {document['storage_path']}: {', '.join(files)}", flush=True)


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
