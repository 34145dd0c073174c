"""Ray jobs of runs: submission, lookup and log streaming.

A job's metadata has the name of its run: the same command finds an active job again instead of submitting another one.
It also has the number of times that the head may resubmit the run after losing the job's driver.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import DASHBOARD_URL
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError, one_line
from ray_on_ecs.node import api
from ray_on_ecs.node.jobs import MAX_RESUBMISSIONS, next_id
from ray_on_ecs.run.command_line import parse
from ray_on_ecs.run.program.source import with_driver
from ray_on_ecs.tracking.shown_log import printable

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from ray_on_ecs.storage.run_storage import RunStorage

# Resubmissions of a run in a row.
DEFAULT_MAX_RESUBMISSIONS = 3
# Time to wait for the head to resubmit a lost run; it polls its jobs every five seconds.
RESUBMISSION_SECONDS = 30.0
POLL_SECONDS = 1.0
# Of a request, after which it is repeated or given up.
ANSWER_SECONDS = 60.0
SUBMIT_ATTEMPTS = 3
# Ray passes the command to a shell as one argument, which Linux limits to 128 KiB.
MAX_COMMAND_BYTES = 120 * 2**10
WRONG_TOKEN = (
    "RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's, and RAY_AUTH_MODE=token"
)
# Loggers of Ray's client that report each upload and each closed connection.
NOISY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
# Of a log, by which it is known again: its first line has the time of the job's start.
BEGIN_CHARACTERS = 1000
# Time that a new head may need until it accepts jobs.
AGENT_SECONDS = 60.0


@dataclass(frozen=True)
class Submission:
    """Run to submit.

    Attributes:
        run: The metadata that all jobs of a run share.
        script: The typed settings; the others get their defaults from the head's environment.
        workers: The minimum number of workers; 0 if the cluster decides.
    """

    run: dict[str, str]
    script: RunConfig
    workers: int = 0

    def __post_init__(self) -> None:
        """Check the length of the command.

        Raises:
            UsageError: It is too long.
        """
        size = len(self.entrypoint.encode())
        if size > MAX_COMMAND_BYTES:
            raise UsageError(
                f"SCRIPT: the command has {size / 2**10:,.0f} KiB, and that of a job may have "
                f"{MAX_COMMAND_BYTES / 2**10:.0f}; put the arguments into a file, which the script reads"
            )

    @property
    def entrypoint(self) -> str:
        """The job's shell command."""
        return self.script.job_command()

    def with_code(self, storage: "RunStorage", say: Callable[[str], None], *, is_here: bool) -> Self:
        """Store the user's code, and return the submission that names it.

        Args:
            storage: The folder for the code.
            say: Prints the files that are left out.
            is_here: True if the job runs on this machine, where it finds the user's folder.

        Raises:
            UsageError: The code is too large, or can't be stored.
        """
        from ray_on_ecs.run.code import archive  # it imports pyarrow

        script = archive.store(self.script, storage, say, links=is_here)
        return replace(self, script=script if is_here else replace(script, working_dir="."))


def submission_of_script(arguments: Sequence[str]) -> Submission:
    """Return the submission of a script with these arguments of `python -m ray_on_ecs.run`.

    Raises:
        UsageError: One can't be used, or a file is missing.
    """
    config = parse(arguments).resolve_defaults()
    config.check_files()
    config = with_driver(config)
    typed = replace(parse(arguments, {}), driver=config.driver)
    named = {"run_name": config.run_name, "working_dir": str(config.folder)}
    script = replace(typed, **named, requirements=config.requirements_in_folder)
    workers = config.workers[0] if config.workers else 0
    return Submission(run_identity(config, typed), script, workers)


def run_identity(config: RunConfig, typed: RunConfig) -> dict[str, str]:
    """Return the metadata that all jobs of a run share.

    The same name under another storage path is another run. Only a typed storage path can be compared, because the
    default comes from the head's environment.
    """
    return {"run_name": str(config.run_name), "storage_path": typed.storage_path}


def connect() -> "JobSubmissionClient":
    """Connect to the Jobs API of the head's dashboard; Ray reads the address and the token from the environment.

    Raises:
        UsageError: The head refuses the token.
        ResourceError: The address is wrong, or no dashboard answers.
    """
    from ray.exceptions import AuthenticationError  # takes seconds, so not for --help or a mistyped flag
    from ray.job_submission import JobSubmissionClient

    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        # RAY_API_SERVER_ADDRESS and RAY_ADDRESS override it
        return cast("JobSubmissionClient", _Client(limited(JobSubmissionClient)(DASHBOARD_URL)))
    except AuthenticationError as cause:
        raise UsageError(WRONG_TOKEN) from cause
    except (LookupError, OSError, RuntimeError, TypeError, ValueError) as cause:
        url = os.environ.get("RAY_API_SERVER_ADDRESS") or DASHBOARD_URL
        raise ResourceError(
            f"the dashboard of the Ray head doesn't answer at {url} ({one_line(cause)}); set RAY_API_SERVER_ADDRESS to "
            "its URL"
        ) from cause


def limited(client: Any) -> Any:
    """Return a class of Ray's client whose requests end after a while; Ray's own would wait for ever."""

    class Limited(client):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": ANSWER_SECONDS, **options})

    return Limited


class _Client:
    """Ray's client, whose calls raise OSError also for what is not an answer of Ray's, and UsageError for the token."""

    def __init__(self, client: "JobSubmissionClient") -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with _answering():
                return getattr(self._client, name)(*arguments, **options)

        return call


@contextmanager
def _answering() -> Generator[None]:
    """Raise the errors of `_Client`."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except (OSError, RuntimeError):
        raise
    except AuthenticationError as cause:
        raise UsageError(WRONG_TOKEN) from cause
    except (LookupError, TypeError, ValueError) as cause:
        raise api.AnswerError(f"not an answer of Ray's: {cause!r}") from cause


def find_or_submit(
    client: "JobSubmissionClient",
    work: Submission,
    metadata: dict[str, str],
    *,
    follows: bool = True,
) -> str:
    """Return the ID of the run's active job, or else of a new one, and print it.

    Args:
        client: The client of the Jobs API.
        work: The run.
        metadata: Of its job.
        follows: Whether the caller shows its log.

    Raises:
        ResourceError: The head does not accept the job.
    """
    name = work.run["run_name"]
    attempts = SUBMIT_ATTEMPTS
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            jobs = submitted(client.list_jobs())
            if job_id := under_way(jobs, work.run):
                what = "its log from the start" if follows else "nothing is submitted"
                _say(f"run {name} is already active as job {job_id}, with the flags of its first command: {what}")
                return job_id
            # Ray keeps ended jobs, and their IDs are unique.
            job_id = next_id(name, jobs) if name in jobs else name
            client.submit_job(entrypoint=work.entrypoint, submission_id=job_id, metadata=metadata)
        except (OSError, RuntimeError, ValueError) as cause:
            attempts -= 1
            if "already exists" in str(cause) and attempts:  # another command has submitted a job, perhaps of this run
                continue
            # The head has just started, or its response was lost; an accepted job is in the next list.
            is_passing = isinstance(cause, OSError) and not isinstance(cause, api.AnswerError)
            is_passing = is_passing or "try again later" in str(cause)
            if is_passing and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            raise ResourceError(f"the Ray head did not accept the job ({one_line(cause)})") from cause
        _say(f"run {name} is submitted as job {job_id}")
        return job_id


def submitted(listed: list[Any]) -> dict[str, Any]:
    """Return the submitted jobs by ID, without drivers that were started by hand, which have no ID."""
    return {job.submission_id: job for job in listed if job.submission_id}


def of_run(jobs: dict[str, Any], run: dict[str, str]) -> dict[str, Any]:
    """Return the jobs of a run by ID."""
    return {job_id: job for job_id, job in jobs.items() if run.items() <= (job.metadata or {}).items()}


def under_way(jobs: dict[str, Any], run: dict[str, str]) -> str | None:
    """Return the ID of the run's pending or running job, or None."""
    active = [job_id for job_id, job in of_run(jobs, run).items() if not job.status.is_terminal()]
    return active[0] if active else None


def is_under_way(client: "JobSubmissionClient", work: Submission) -> bool:
    """Return True if a job of the run is pending or running; False if the head doesn't answer yet."""
    try:
        return under_way(submitted(client.list_jobs()), work.run) is not None
    except (OSError, RuntimeError, ValueError):
        return False


class UnreadLogs:
    """Reader of jobs' logs that skips what it has read before: with each connection Ray sends a log from its start.

    A log that begins in another way is another one and is read from its start: a new head, or a program that has
    emptied its output, has begun it again, and it may be shorter than what has been read.
    """

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        self._begin: dict[str, str] = {}

    async def read(self, client: "JobSubmissionClient", job_id: str) -> AsyncIterator[str]:
        """Yield the rest of a job's log until it ends. A part counts as read once the next one is requested."""
        end = 0
        with _answering():
            async for text in client.tail_job_logs(job_id):
                begin, read = self._begin.get(job_id, ""), self._read.get(job_id, 0)
                if not text.startswith(begin[end : end + len(text)]):
                    yield "\n"  # ends the line where the other log ended
                    text, begin, read, end = begin[:end] + text, "", 0, 0
                start, end = end, end + len(text)
                yield text[max(read - start, 0) :]
                self._read[job_id] = max(read, end)
                self._begin[job_id] = max(begin, (begin[:start] + text)[:BEGIN_CHARACTERS], key=len)


# Shows a job's log, until it ends.
ShowLog = Callable[["JobSubmissionClient", str], Coroutine[Any, Any, None]]


def follow_to_end(client: "JobSubmissionClient", run: dict[str, str], job_id: str, show: ShowLog) -> tuple[str, Any]:
    """Show the logs of the job and of its resubmissions by the head.

    Returns:
        The ID and Ray's details of the last job.

    Raises:
        OSError, RuntimeError, aiohttp.ClientError: The connection was lost.
    """
    while True:
        job = _show_to_end(client, job_id, show)
        successor = _resubmitted(client, run, job)
        if successor is None:
            return job_id, job
        _say(f"job {job_id} lost its driver; the head has submitted run {run['run_name']} again as job {successor}")
        job_id = successor


def _show_to_end(client: "JobSubmissionClient", job_id: str, show: ShowLog) -> Any:
    asyncio.run(show(client, job_id))
    job: Any = client.get_job_info(job_id)
    if not job.status.is_terminal():
        raise ConnectionError("the log ended before the job")
    return job


def _resubmitted(client: "JobSubmissionClient", run: dict[str, str], lost: Any) -> str | None:
    """Wait for the head to resubmit the run if this job lost its driver; return the new ID, or None."""
    if not _lost_driver(lost) or (lost.metadata or {}).get(MAX_RESUBMISSIONS, "0") == "0":
        return None
    deadline = time.monotonic() + RESUBMISSION_SECONDS
    while time.monotonic() < deadline:
        jobs = of_run(submitted(client.list_jobs()), run)
        later = {job_id: job.start_time for job_id, job in jobs.items() if job.start_time > lost.start_time}
        if later:
            return min(later, key=lambda job_id: later[job_id])
        time.sleep(POLL_SECONDS)
    return None


def _lost_driver(job: Any) -> bool:
    """Return True if the job failed because its driver or its head died."""
    status = job.driver_exit_code
    return job.status == "FAILED" and (status is None or status < 0 or status > Interrupted.exit_status)


def driver_exit_status(job_id: str, job: Any, again: str) -> int:
    """Return the driver's exit status; print a line if a signal ended it, as the log doesn't show that.

    Raises:
        Interrupted: The job was stopped.
        TrainingError: The driver's exit status is not known.
    """
    status = job.driver_exit_code
    if status is None and job.status == "STOPPED":
        raise Interrupted(f"job {job_id} was stopped; {again} resumes the run")
    if status is None:
        raise TrainingError(f"job {job_id} failed ({one_line(job.message or job.error_type)}); {again} resumes the run")
    if status < 0:
        line = f"ray-on-ecs: job {job_id} was ended by signal {-status}; {again} resumes the run"
        print(printable(line), file=sys.stderr)
        return 128 - status  # as a shell reports a signal
    return status


def _say(line: str) -> None:
    print(printable(line), flush=True)
