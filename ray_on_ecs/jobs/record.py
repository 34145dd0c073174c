"""Record of a job, a driver of a run: its keys and states, which runs it belongs to, and how it has ended."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ray_on_ecs import secrets
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.rules import is_run_name
from ray_on_ecs.signals import SIGNALLED

# submission_id, metadata, uri, log, status, start_time and end_time (ms), driver_exit_code, message, is_interrupted;
# is_stopped, a user has asked it to end; is_settled, it was lost, and another job has continued its run, or none will.
Job = dict[str, Any]
TYPES: dict[str, Any] = {
    "submission_id": str,
    "metadata": dict,
    "uri": str,
    "log": str,
    "status": str,
    "start_time": int,
    "end_time": int | None,
    "driver_exit_code": int | None,
    "message": str | None,
    "is_interrupted": bool,
}

# Keys of a job's metadata. Jobs belong to the same run if they agree in RUN; the run's name is the first job's ID.
RUN = ("run_name", "storage_path")
MAX_RESUBMISSIONS = "max_resubmissions"
RESUBMISSIONS = "resubmissions"
# Present if the run stops its workers at its end (node/scaling.py).
THEN_STOP = "then_stop"
# A file in a job's folder: the ID of the last request for the stacks of its ranks.
STACKS_REQUEST = "stacks"
# A JSON list: the run's folder, and the names of its stored secrets.
SECRETS = "secrets"
# The ID of the request that the job answers.
REQUEST = "request"

# A run whose head has been away for longer (s) is not continued; nor is a request that no head has accepted since.
DAY = 86400.0

PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED = "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"
ENDED = {STOPPED, SUCCEEDED, FAILED}
# Exit codes of a driver that was killed or crashed. SIGINT and SIGTERM are not among them: they are a user's stop.
KILL_STATUSES = {-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV)}
# Of one that was asked to end.
INTERRUPTED = (SIGNALLED + signal.SIGINT, SIGNALLED + signal.SIGTERM, -signal.SIGTERM)


def pending(job_id: str, metadata: Mapping[str, str], start: float, uri: str = "") -> Job:
    """Return a job whose driver has not started, which it does, or was asked to, at a time (Unix time)."""
    times: dict[str, Any] = {"start_time": int(1000 * start), "end_time": None}
    ids = {"submission_id": job_id, "metadata": dict(metadata), "uri": uri, "log": ""}
    return {**ids, **times, "status": PENDING, "driver_exit_code": None, "message": None, "is_interrupted": False}


def next_id(name: str, taken: Container[str]) -> str:
    """Return the name, or the first of the job IDs `name.2`, `name.3`, ... that is not taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


def is_of(job: Job, run: Mapping[str, str]) -> bool:
    """Return True if a job is one of a run, which may be given by its name alone."""
    return run.items() <= job["metadata"].items()


def under_way(jobs: Iterable[Job], run: Mapping[str, str]) -> Job | None:
    """Return the run's pending or running job, or None."""
    return next((job for job in jobs if job["status"] not in ENDED and is_of(job, run)), None)


def is_job(value: Any) -> bool:
    """Return True if a document's value has all that a job has."""
    if not isinstance(value, dict) or not all(isinstance(value.get(key), kind) for key, kind in TYPES.items()):
        return False
    return all(isinstance(text, str) for text in value["metadata"].values())


def key_of(job: Job) -> str:
    """Return what identifies a job over all heads: its log, or its request as long as it has not started."""
    return job["log"] or job["metadata"].get(REQUEST, "")


def is_lost(job: Job) -> bool:
    """Return True if a job was lost (`was_lost`), and its run is to be continued."""
    return was_lost(job) and not job.get("is_settled")


def was_lost(job: Job) -> bool:
    """Return True if a job has lost its driver or its head: it has neither ended by itself, nor did a user stop it."""
    if job["status"] != FAILED:
        return False
    status = job["driver_exit_code"]
    return status is None or status in KILL_STATUSES or (job["is_interrupted"] and status in INTERRUPTED)


def goes_on(job: Job) -> bool:
    """Return True if a job is under way, or was lost and is about to be submitted again."""
    given, most = number_in(job["metadata"], RESUBMISSIONS), number_in(job["metadata"], MAX_RESUBMISSIONS)
    return job["status"] not in ENDED or (is_lost(job) and given < most)


def last_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Return the job of each run that ended last, or that still runs.

    The job that started last may have been refused by the run's lock while an earlier one trains.
    """

    def times(job: Job) -> tuple[float, float]:
        return (job["end_time"] or job["start_time"]) if job["status"] in ENDED else math.inf, job["start_time"]

    last = {tuple(str(job["metadata"].get(key)) for key in RUN): job for job in sorted(jobs, key=times)}
    return list(last.values())


def number_in(metadata: Mapping[str, str], key: str) -> int:
    """Return a count in a job's metadata; 0 without one."""
    text = metadata.get(key, "")
    return int(text) if text.isdecimal() else 0


def stored_secrets(metadata: Mapping[str, Any] | None) -> list[str]:
    """Return the run's folder and the names of its stored secrets, by a job's metadata; empty if it has none."""
    try:
        stored = json.loads((metadata or {}).get(SECRETS, "[]"))
    except (TypeError, ValueError, RecursionError):  # others can write the metadata
        return []
    # They become a folder and the files in it.
    match stored:
        case [str(uri), *names] if names and is_run_name(uri.rpartition("/")[2]) and all(map(secrets.is_name, names)):
            return stored
    return []


def delete_secrets(metadata: Mapping[str, Any], store: Callable[[str], secrets.Store] = secrets.store) -> None:
    """Delete the secrets of a job's run; if that is not possible, `stop` and `rm` do it."""
    uri, *names = stored_secrets(metadata) or [""]
    if names:
        with suppress(OSError, TrainingError):
            store(uri).delete(names)
