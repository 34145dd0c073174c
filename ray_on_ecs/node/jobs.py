"""Job recovery of the head: stops jobs with the head, and resubmits jobs that lost their driver or their head.

The only memory is Ray's table of jobs, which is part of the head's state: the job of a run that ended last decides. A
job takes part if its metadata has its run's name and `max_resubmissions`, which the client
(ray_on_ecs/cluster/jobs.py) writes.
"""

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any

from ray_on_ecs import secrets
from ray_on_ecs.contract import WORKER_TIMEOUT
from ray_on_ecs.errors import TrainingError, one_line
from ray_on_ecs.node import api, ports
from ray_on_ecs.node.api import Job
from ray_on_ecs.node.state import State
from ray_on_ecs.rules import is_run_name

logger = logging.getLogger(__name__)

# Keys of a job's metadata. Jobs belong to the same run if they agree in RUN; the run's name is the first job's ID.
RUN = ("run_name", "storage_path")
MAX_RESUBMISSIONS = "max_resubmissions"
RESUBMISSIONS = "resubmissions"
# A JSON list: the run's folder, and the names of its stored secrets.
SECRETS = "secrets"

ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}
# Ray's error types of a job whose supervisor, the actor that runs the driver, is dead. After
# JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE the driver may still run.
SUPERVISOR_LOST = {
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
}
# Exit codes of a driver that was killed or crashed. SIGINT and SIGTERM are not among them: they are a user's stop.
FATAL_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV}
# Python's exit statuses of a killed process, and a shell's.
KILL_STATUSES = {-number for number in FATAL_SIGNALS} | {128 + number for number in FATAL_SIGNALS}
# A job that lasted this long has made progress, so the resubmissions before it don't count. It is longer than a run
# waits for its workers: else a driver that is killed at every start of the training would be resubmitted for ever.
PROGRESS_SECONDS = 2.0 * WORKER_TIMEOUT

POLL_SECONDS = 5.0  # a lost run costs more
SUBMIT_SECONDS = 30.0  # Ray's agent starts a supervisor first
# Grace period of a stopped job before Ray kills it. Ray's default, 3 s, is too short: a script has 30 s after SIGTERM,
# and its workers 30 s more to store its files.
JOB_LIMIT, JOB_LIMIT_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S", "70"
STOP_SECONDS = 75.0  # longer than that
# A client that follows a job's log receives its last line only after two polls of Ray's, a second apart.
LAST_LINE_SECONDS = 2.5
ORPHANS_SECONDS, ORPHANS_POLL_SECONDS = 120.0, 2.0  # Ray's agent may still be starting


def url() -> str:
    """Return the URL of this head's Jobs API."""
    return f"http://127.0.0.1:{ports.DASHBOARD}/api/jobs/"


def wait_for_jobs_api() -> None:
    """Return once the dashboard accepts our token and reports the GCS as alive."""
    while True:
        with suppress(OSError):
            for endpoint in ("version", "gcs_healthz"):
                api.get(f"http://127.0.0.1:{ports.DASHBOARD}/api/{endpoint}")
            return
        time.sleep(1)


def next_id(name: str, taken: Container[str]) -> str:
    """Return the first of the job IDs `name.2`, `name.3`, ... that is not taken."""
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


class JobRecovery:
    """Thread that watches the head's jobs, and resubmits each run whose last job lost its driver or head.

    A job whose driver exited, or that a user stopped, is not resubmitted.
    """

    def __init__(self, state: State | None) -> None:
        self._state = state
        self._interrupted = state.interrupted_jobs if state else set()
        self._started_at = time.time()
        self._stopping = threading.Event()
        self._reported: set[tuple[str, str]] = set()
        self._without_secrets: set[str] = set()

    def start(self) -> None:
        """Start the thread; it ends with this process."""
        threading.Thread(target=self.run, name="jobs", daemon=True).start()

    def run(self) -> None:
        """Recover the jobs of the previous head once Ray is up, then watch the jobs until the head stops."""
        wait_for_jobs_api()
        logger.debug(f"the Jobs API answers; jobs of the previous head: {sorted(self._interrupted) or 'none'}")
        if self._state:
            self.fail_orphaned_jobs()
            self.resubmit_lost_jobs()
            wait_for_jobs_api()  # reading the jobs of a damaged state can end Ray
            self._state.mark_healthy()
        while not self._stopping.wait(POLL_SECONDS):
            self.resubmit_lost_jobs()

    def stop_jobs(self) -> signal.Signals:
        """Stop the jobs, whose drivers run on the head, so that each can print the command that resumes it.

        The node is drained after some seconds even if a job has not ended. The state records their IDs, so that the
        next head resubmits them.
        """
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        jobs = _running()
        if self._state and jobs:
            try:
                self._state.record_interrupted(jobs)
            except OSError as cause:
                logger.warning(f"the next head will not submit the jobs again ({cause})")
        for job in jobs:
            logger.info(f"stopping job {job}")
            try:
                api.post(f"{url()}{job}/stop")
            except OSError as cause:
                logger.warning(f"job {job} could not be stopped ({cause})")
        while _running() and time.monotonic() < deadline:
            time.sleep(0.5)
        if jobs:
            time.sleep(LAST_LINE_SECONDS)
        return signal.SIGTERM

    def fail_orphaned_jobs(self) -> None:
        """Make Ray mark the previous head's jobs, whose drivers are gone, as FAILED.

        Ray checks a job only when a request for it arrives, and would show it as running until then.
        """
        deadline = time.monotonic() + ORPHANS_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):  # the dashboard is busy
                orphans = [
                    job["submission_id"]
                    for job in _submitted_jobs()
                    if job["status"] not in ENDED and (job["start_time"] or 0) < 1000 * self._started_at
                ]
                if not orphans:
                    return
                for job in orphans:
                    self._report(job, "has ended with the head that it ran on")
                    with suppress(OSError):  # Ray's agent is still starting, or busy
                        api.post(f"{url()}{job}/stop")
            time.sleep(ORPHANS_POLL_SECONDS)

    def resubmit_lost_jobs(self) -> None:
        """Resubmit each run whose last job lost its driver or head, up to `max_resubmissions` times in a row."""
        try:
            jobs = _submitted_jobs()
        except OSError as cause:  # the dashboard is busy, or the head is ending
            logger.debug(f"the jobs are not known, and will be read again ({cause})")
            return
        ids = {job["submission_id"] for job in jobs}
        for job in _last_jobs(jobs):
            try:
                was_interrupted = job["status"] == "STOPPED" and job["submission_id"] in self._interrupted
                lost_its_driver = job["error_type"] in SUPERVISOR_LOST or job["driver_exit_code"] in KILL_STATUSES
                is_lost = was_interrupted or (job["status"] == "FAILED" and lost_its_driver)
                if is_lost and not self._stopping.is_set():
                    self._resubmit(job, ids)
            # Another client may have submitted the job with any metadata; the others are resubmitted nevertheless.
            except Exception as cause:
                self._report(job["submission_id"], f"can't be submitted again ({one_line(repr(cause))})")

    def _resubmit(self, job: Job, taken: set[str]) -> None:
        lost = job["submission_id"]
        metadata = job["metadata"]
        maximum = _number(metadata, MAX_RESUBMISSIONS)
        seconds = ((job["end_time"] or 0) - (job["start_time"] or 0)) / 1000
        # In a row: without progress in between, before this job was lost.
        resubmissions = 0 if seconds >= PROGRESS_SECONDS else _number(metadata, RESUBMISSIONS)
        if resubmissions >= maximum:
            self._delete_secrets(job)
            if maximum:
                self._report(lost, f"is not submitted again: its run was lost {maximum + 1} times in a row")
            return
        successor = next_id(metadata[RUN[0]], taken)
        body = {
            "submission_id": successor,
            "entrypoint": job["entrypoint"],
            "runtime_env": job.get("runtime_env"),
            "metadata": {**metadata, RESUBMISSIONS: str(resubmissions + 1)},
        }
        try:
            api.post(url(), body, timeout=SUBMIT_SECONDS)
        except OSError as cause:  # the next poll tries again, unless Ray has accepted the job nevertheless
            self._report(lost, f"could not be submitted again ({cause})")
        else:
            self._report(lost, f"was lost; submitted again as {successor} ({resubmissions + 1} of {maximum})")

    def _delete_secrets(self, job: Job) -> None:
        """Delete the secrets of a run that is not resubmitted, once."""
        stored = stored_secrets(job["metadata"])
        if not stored or job["submission_id"] in self._without_secrets:
            return
        uri, *names = stored
        with suppress(OSError, TrainingError):  # the next poll tries again
            secrets.store(uri).delete(names)
            self._without_secrets.add(job["submission_id"])

    def _report(self, job: str, event: str) -> None:
        """Print an event of a job, once."""
        if (job, event) not in self._reported:
            self._reported.add((job, event))
            logger.info(f"job {job} {event}")


def stored_secrets(metadata: Mapping[str, Any] | None) -> list[str]:
    """Return the run's folder and the names of its stored secrets, by a job's metadata; empty if it has none."""
    try:
        stored = json.loads((metadata or {}).get(SECRETS, "[]"))
    except (TypeError, ValueError, RecursionError):  # not a job of `ray-on-ecs run`
        return []
    # They become a folder and the files in it.
    match stored:
        case [str(uri), *names] if names and is_run_name(uri.rpartition("/")[2]) and all(map(secrets.is_name, names)):
            return stored
    return []


def any_under_way() -> bool:
    """Return True if a job is pending or running, or a driver that was started by hand, as in the head's shell."""
    return any(job["status"] not in ENDED for job in api.items_in(url(), api.get(url()), api.JOB))


def _submitted_jobs() -> list[Job]:
    """Return the jobs without drivers that were started by hand, which have no submission ID."""
    return [job for job in api.items_in(url(), api.get(url()), api.JOB) if job["submission_id"]]


def _running() -> list[str]:
    """Return the IDs of the jobs that have not ended; empty if the dashboard doesn't answer."""
    try:
        return [job["submission_id"] for job in _submitted_jobs() if job["status"] not in ENDED]
    except OSError as cause:
        logger.warning(f"the jobs are not known ({cause})")
        return []


def _last_jobs(jobs: list[Job]) -> list[Job]:
    """Return the job of each run that ended last, or that still runs.

    The job that started last may have been refused by the run's lock while an earlier one trains.
    """

    def times(job: Job) -> tuple[float, float]:
        start = job["start_time"] or 0
        return (job["end_time"] or start) if job["status"] in ENDED else math.inf, start

    last = {}
    for job in sorted(jobs, key=times):
        metadata = job["metadata"] or {}
        if RUN[0] in metadata:
            last[tuple(str(metadata.get(key)) for key in RUN)] = job
    return list(last.values())


def _number(metadata: dict[str, str], key: str) -> int:
    text = metadata.get(key, "")
    return int(text) if text.isdecimal() else 0
