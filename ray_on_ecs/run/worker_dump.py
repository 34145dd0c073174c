"""The files that failed workers leave on their nodes: their processes and logs.

Every worker keeps a file in its node's temporary folder while it trains. After a failure the driver collects these
files from all nodes, and kills a worker that is still there: one that the system has stopped never answers, and would
hold its GPU for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_on_ecs.private_folder import node_folder

ANSWER_SECONDS = 120.0
LAST_LINES = 50
LAST_BYTES = 2**16


@dataclass(frozen=True)
class WorkerDump:
    """A worker that failed, or was ended because another one had failed.

    Attributes:
        rank: Its rank.
        log: The end of its log, or why it can't be had.
    """

    rank: int
    log: Sequence[str] = ()


def worker_file(run_uri: str, rank: int) -> Path:
    """Return the file on this node that a worker of this run keeps while it trains."""
    return _folder(run_uri) / f"rank-{rank}-{os.getpid()}.txt"


def about_worker(rank: int) -> dict[str, Any]:
    """Return the content of that file for this process."""
    context = ray.get_runtime_context()
    return {
        "rank": rank,
        "node_id": context.get_node_id(),
        "job_id": context.get_job_id(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "logs": _log_files(),
    }


def collect(run_uri: str) -> list[WorkerDump]:
    """Collect the dumps of this driver's workers from all nodes, by rank, and kill workers that still run.

    Those of an earlier driver of the same run are killed too, but not returned: their failure is another one.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    tasks = [
        _collect_here.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            run_uri, node
        )
        for node in nodes
    ]
    done, _ = ray.wait(tasks, num_returns=len(tasks), timeout=ANSWER_SECONDS)
    dumps: list[WorkerDump] = []
    for task in done:
        with suppress(RayError):  # the node has just gone
            dumps += ray.get(task)
    return sorted(dumps, key=lambda worker: worker.rank)


@ray.remote(num_cpus=0, max_retries=0)
def _collect_here(run_uri: str, node_id: str) -> list[WorkerDump]:
    dumps = []
    job_id = ray.get_runtime_context().get_job_id()
    for file in _folder(run_uri).glob("rank-*.txt"):
        about = json.loads(file.read_text())
        if about["node_id"] != node_id:  # several nodes on one machine
            continue
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(about["pid"])
            if process.create_time() == about["created"]:  # else another process has the ID by now
                process.kill()
        if about["job_id"] == job_id:
            log = [line for path in about.get("logs", ()) for line in _last_lines(path)]
            dumps.append(WorkerDump(about["rank"], log))
        file.unlink(missing_ok=True)
    return dumps


def _log_files() -> list[str]:
    """Return the files of this process's standard output and error, if the system provides them."""
    try:
        return [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
    except OSError:
        return []


def _last_lines(file: str) -> list[str]:
    moved = Path(file).parent / "old" / Path(file).name  # where Ray moves some logs of processes that have ended
    try:
        with open(file if os.path.exists(file) else moved, "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - LAST_BYTES, 0))
            return log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as cause:
        return [f"{file} can't be read ({cause.strerror})"]


def _folder(run_uri: str) -> Path:
    return node_folder("workers", run_uri)
