"""Jobs of runs, of a Ray head or of this machine: submission, lookup and end.

A job's metadata has the name of its run: the same command finds an active job again instead of submitting another one.
It also has the number of times that a head may resubmit the run after losing the job's driver.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ray_on_ecs.cluster.local_jobs import Jobs
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError, one_line
from ray_on_ecs.node.api import AnswerError, Job
from ray_on_ecs.node.jobs import ENDED, KILL_STATUSES, MAX_RESUBMISSIONS, next_id
from ray_on_ecs.signals import SIGNALLED
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.shown_log import printable

DEFAULT_MAX_RESUBMISSIONS = 3  # in a row
# Time to wait for the head to resubmit a lost run; it polls its jobs every five seconds.
RESUBMISSION_SECONDS = 30.0
POLL_SECONDS = 1.0  # a user waits
SUBMIT_ATTEMPTS = 3
# Time that a new head may need until it accepts jobs.
AGENT_SECONDS = 60.0

# Writes the document of a run, and returns metadata of its job.
WriteDocument = Callable[[], dict[str, str]]


@dataclass(frozen=True)
class Submission:
    """Run to submit: the metadata that all its jobs share (`run_of`), and the folder with its document."""

    run: dict[str, str]
    uri: str

    @property
    def entrypoint(self) -> str:
        """The job's shell command; -P keeps its working directory off sys.path.

        A shell that stayed would be another process of each run, and would print `Killed` after the driver's lines.
        """
        return f"exec {shlex.join(['python', '-P', '-m', 'ray_on_ecs.run', self.uri])}"


def run_of(name: str, storage_path: str) -> dict[str, str]:
    """Return the metadata that all jobs of a run share. A name under another storage path is another run."""
    return {"run_name": name, "storage_path": storage_path}


def find_or_submit(head: Jobs, work: Submission, upload: Callable[[], WriteDocument], *, follows: bool = True) -> str:
    """Return the ID of the run's active job, or else of a new one, and print it.

    The document is written directly before the submission, so that it stays that of a run under way. If two commands
    are that close nevertheless, the job of the other document refuses this one (`RunDocument.read`).

    Args:
        head: What has the jobs.
        work: The run.
        upload: Stores the code, unless the run is under way; the result writes the document.
        follows: The caller shows the log.

    Raises:
        ResourceError: The head does not accept the job.
    """
    name = work.run["run_name"]
    write: WriteDocument | None = None
    attempts = SUBMIT_ATTEMPTS
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            with head.submitting():
                jobs = head.submitted_jobs()
                if active := under_way(jobs, work.run):
                    log = "its log from the start" if follows else "nothing is submitted"
                    say(f"run {name} is already active as job {active}, with the flags of its first command: {log}")
                    return active
                # Ended jobs are kept, and their IDs are unique.
                job_id = next_id(name, jobs) if name in jobs else name
                if write is not None:
                    head.submit(job_id, work.entrypoint, {**work.run, **write()})
                    say(f"run {name} is submitted as job {job_id}")
                    return job_id
        except AnswerError as cause:
            if "already exists" in cause.reason and attempts > 1:  # by another command, perhaps of this run
                attempts -= 1
                continue
            # The head has just started, or its response was lost; an accepted job is in the next list.
            if (cause.is_passing or "try again later" in cause.reason) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            raise ResourceError(f"the Ray head did not accept the job: {cause}") from cause
        write = upload()  # takes a while: another command may be faster
        deadline = time.monotonic() + AGENT_SECONDS


def of_run(jobs: Mapping[str, Job], run: Mapping[str, str]) -> dict[str, Job]:
    """Return the jobs of a run by ID."""
    return {job_id: job for job_id, job in jobs.items() if run.items() <= (job.get("metadata") or {}).items()}


def under_way(jobs: Mapping[str, Job], run: Mapping[str, str]) -> str | None:
    """Return the ID of the run's pending or running job, or None."""
    return next((job_id for job_id, job in of_run(jobs, run).items() if job["status"] not in ENDED), None)


class UnreadLog:
    """Unread part of a job's log: with each connection Ray sends it from its start."""

    def __init__(self) -> None:
        self._read = self._end = 0

    def connect(self) -> None:
        """Begin to read from a new connection."""
        self._end = 0

    def rest(self, text: str) -> str:
        """Return what is new of the connection's next part."""
        start, self._end = self._end, self._end + len(text)
        new = text[max(self._read - start, 0) :]
        self._read = max(self._read, self._end)
        return new


def resubmitted(head: Jobs, run: Mapping[str, str], lost: Job) -> str | None:
    """Wait for the head to resubmit the run if this job lost its driver or its head; return the new ID, or None."""
    status = lost.get("driver_exit_code")
    has_lost_driver = lost["status"] == "FAILED" and (status is None or not 0 <= status <= Interrupted.exit_status)
    if not has_lost_driver or (lost.get("metadata") or {}).get(MAX_RESUBMISSIONS, "0") == "0":
        return None
    deadline = time.monotonic() + RESUBMISSION_SECONDS
    while time.monotonic() < deadline:
        for job_id, job in of_run(head.submitted_jobs(), run).items():
            if (job.get("start_time") or 0) > (lost.get("start_time") or 0):
                return job_id
        time.sleep(POLL_SECONDS)
    return None


def driver_exit_status(job_id: str, job: Job, storage: RunStorage, way_on: Callable[[], str]) -> int:
    """Return the exit status of a job that has ended; print a line if it was killed, as the log doesn't show that.

    The results of the run count more than the end of its processes. `way_on` returns what is kept of it, and the
    command that continues it.

    Raises:
        Interrupted: The job was stopped.
        TrainingError: The driver's exit status is not known.
    """
    status = job.get("driver_exit_code")
    if status is not None and status >= 0:
        if status not in KILL_STATUSES:
            return status
        status = SIGNALLED - status  # a head starts its drivers by a shell
    state = _last_state(storage, job_id)
    cause = one_line(job.get("message") or job.get("error_type"))
    how = f"failed ({cause})" if status is None else f"was ended by signal {-status}"
    if state == "finished":
        say(f"run {storage.run_name} is finished, although job {job_id} {how}; results in {storage.uri}")
        return 0
    if status is None and job["status"] == "STOPPED":
        raise Interrupted(f"job {job_id} was stopped; {way_on()}")
    if status is None and state in ("failed", "interrupted"):  # the log says why
        return TrainingError.exit_status if state == "failed" else Interrupted.exit_status
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
