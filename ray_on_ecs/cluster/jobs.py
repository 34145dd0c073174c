"""Jobs of runs, of a cluster's head or of this machine: submission, lookup and end.

A job's metadata has the name of its run: the same command finds an active job again instead of submitting another one.
It also has the number of times that a head may resubmit the run after losing the job's driver.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping

from ray_on_ecs.errors import Interrupted, LimitReached, TrainingError, UsageError, one_line
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import (
    MAX_RESUBMISSIONS,
    RESUBMISSIONS,
    STOPPED,
    Job,
    is_lost,
    is_of,
    number_in,
    under_way,
    was_lost,
)
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.signals import SIGNALLED
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.shown_log import printable

DEFAULT_MAX_RESUBMISSIONS = 3  # in a row
# Time to wait for the head to resubmit a lost run, which polls its jobs every second; and first for another head.
RESUBMISSION_SECONDS, HEAD_SECONDS = 30.0, 900.0
POLL_SECONDS = 1.0  # a user waits
# Exit statuses of a run by its state.
STATUSES = {
    "finished": 0,
    "failed": TrainingError.exit_status,
    "interrupted": Interrupted.exit_status,
    "limit": LimitReached.exit_status,
}

# The jobs of this machine, or of a cluster's head.
Jobs = MachineJobs | RemoteJobs
# Writes the document of a run, and returns metadata of its job.
WriteDocument = Callable[[], dict[str, str]]


def find_or_submit(
    jobs: Jobs, run: dict[str, str], uri: str, upload: Callable[[], WriteDocument], *, follows: bool = True
) -> str:
    """Return the ID of the run's active job, or else of a new one, and print it; any error if the job is not accepted.

    `run` is the metadata that all its jobs share, `uri` the folder with the document, and `upload` stores the code
    unless the run is under way; its result writes the document, directly before the submission, so that it stays that
    of a run under way. If two commands are that close nevertheless, the job of the other document refuses this one
    (`RunDocument.read`).
    """
    name = run["run_name"]
    write: WriteDocument | None = None
    while True:
        with jobs.submitting():
            if active := under_way(jobs.list_jobs(), run):
                log = "its log from the start" if follows else "nothing is submitted"
                job_id = str(active["submission_id"])
                say(f"run {name} is already active as job {job_id}, with the flags of its first command: {log}")
                return job_id
            if write is not None:
                job_id = jobs.submit(uri, {**run, **write()})
                say(f"run {name} is submitted as job {job_id}")
                return job_id
        write = upload()  # takes a while: another command may be faster


def of_run(jobs: Iterable[Job], run: Mapping[str, str]) -> dict[str, Job]:
    """Return the jobs of a run by ID."""
    return {job["submission_id"]: job for job in jobs if is_of(job, run)}


def resubmitted(jobs: Jobs, run: Mapping[str, str], lost: Job) -> str | None:
    """Wait for this head or the next one to resubmit the run if it lost this job; return the new ID, or None."""
    if not was_lost(lost) or lost["metadata"].get(MAX_RESUBMISSIONS, "0") == "0":
        return None
    said = False
    latest = time.monotonic() + HEAD_SECONDS
    deadline = time.monotonic() + RESUBMISSION_SECONDS
    while time.monotonic() < deadline:
        listed = of_run(jobs.list_jobs(), run)
        for job_id, job in listed.items():
            if job["start_time"] > lost["start_time"] and number_in(job["metadata"], RESUBMISSIONS) > 0:
                return job_id
        if not is_lost(listed.get(lost["submission_id"], lost)):  # it was lost too often, or a user has stopped it
            return None
        if jobs.is_away() and time.monotonic() < latest:
            deadline = time.monotonic() + RESUBMISSION_SECONDS
            if not said:
                say(f"waiting for the next head, which submits run {run['run_name']} again")
                said = True
        time.sleep(POLL_SECONDS)
    return None


def driver_exit_status(job_id: str, job: Job, storage: RunStorage, way_on: Callable[[], str]) -> int:
    """Return the exit status of a job that has ended; print a line if it was killed, as the log doesn't show that.

    The results of the run count more than the end of its processes. `way_on` returns what is kept of it, and the
    command that continues it. Interrupted if the job was stopped, TrainingError if the exit status is not known.
    """
    status = job["driver_exit_code"]
    if status is not None and status >= 0:
        return int(status)
    state = _last_state(storage, job_id)
    cause = one_line(job["message"])
    how = f"failed ({cause})" if status is None else f"was ended by signal {-status}"
    if state == "finished":
        say(f"run {storage.run_name} is finished, although job {job_id} {how}; results in {storage.uri}")
        return 0
    if job["status"] == STOPPED:
        raise Interrupted(f"job {job_id} was stopped; {way_on()}")
    if status is None and state in STATUSES:  # the log says why
        return STATUSES[state]
    if status is None:
        raise TrainingError(f"job {job_id} {how}; {way_on()}")
    print(printable(f"ray-on-ecs: job {job_id} {how}; {way_on()}"), file=sys.stderr)
    return SIGNALLED - status


def _last_state(storage: RunStorage, job_id: str) -> str:
    """Return the state of a run after this job; empty if its folder does not say it."""
    try:
        if layout.RESULT in storage.listing().files:
            return "finished"
        status = storage.read_json(layout.STATUS) or {}
    except (OSError, UsageError, ValueError):
        return ""
    return str(status.get("state")) if status.get("job") == job_id else ""


def say(line: str) -> None:
    """Print a line about a job, before its log."""
    print(printable(line), flush=True)
