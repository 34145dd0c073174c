"""`python -m training.job`: submit a run as a job to the Ray head, and follow its log.

The job's metadata names its run: the same command finds the job again, and submits another one only if none is under
way. It also says how often the head may submit the run again after losing the job's driver. The job's command is
`python -m training`, with the same flags, or `python -m training.launch`, whose code is uploaded with the job.
"""

import argparse
import asyncio
import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp

from training.cli import exit_status
from training.config import RunConfig, environment_variable, parse
from training.errors import Interrupted, ResourceError, TrainingError, UsageError, one_line
from training.recipes.settings import parse_training
from training.scripts import upload
from training.scripts.config import ScriptConfig

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# The default of Ray's own variables, RAY_API_SERVER_ADDRESS and RAY_ADDRESS: on the head itself.
DASHBOARD = "http://127.0.0.1:8265"
# The key of a job's metadata that says how often in a row the head may submit the run again, and its default.
MAX_RESUBMISSIONS = "max_resubmissions"
DEFAULT_MAX_RESUBMISSIONS = 3
# How long to wait for the head to submit a lost run again; the head polls its jobs every five seconds.
RESUBMISSION_SECONDS = 30.0
POLL_SECONDS = 1.0
LAUNCH = "--launch"
SUBMIT_ATTEMPTS = 3
# Parts of Ray's client that log each package, and how a log was closed.
NOISY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
# How long a head that has just started may need until its agent accepts jobs.
AGENT_SECONDS = 60.0
# How long the head may need to start its dashboard again once that has ended, and the pause between two calls.
DASHBOARD_SECONDS = 60.0
RETRY_SECONDS = 2.0

ABOUT = """\
python -m training.job [--max-resubmissions N] [flags of python -m training]
python -m training.job [--max-resubmissions N] --launch [flags of python -m training.launch] SCRIPT [its flags]

Submits a training as a Ray job to the cluster's head, shows its log and exits with its exit status. With --launch it
is a script of your own, whose folder (--working-dir) is uploaded: see python -m training.launch --help. The job keeps
running if this command ends: while the run is under way, the same command with the same --run-name shows the log from
the start, and later it resumes a run that was interrupted. Without --run-name it prints the new name of the run.

If the driver is killed or the head is lost, the head submits the run again, which resumes it from its last checkpoint.
  --max-resubmissions N  times in a row that the head may do so; 0 turns it off. A job that has run for an hour starts
                         the count again (default: 3)

RAY_API_SERVER_ADDRESS is the address of the head's dashboard (default: http://127.0.0.1:8265); exit status 3 if it
doesn't answer. Ctrl-C ends this command, with 130, and not the job. The flags, and the job's own exit status:
"""


def main(arguments: list[str] | None = None) -> int:
    """Submit the run or find it, and follow its log; return the exit status of its driver."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status(
        partial(_submit_and_follow, given), "interrupted; ray job list shows whether there is a job already"
    )


def _submit_and_follow(given: Sequence[str]) -> int:
    if not {"-h", "--help"}.isdisjoint(given):
        print(ABOUT)
    max_resubmissions, work = parse_arguments(given)
    client = connect()
    metadata = {**work.run, MAX_RESUBMISSIONS: str(max_resubmissions)}
    return _follow(client, work.run, find_or_submit(client, work, metadata))


@dataclass(frozen=True)
class Submission:
    """What is submitted.

    Attributes:
        run: The part of a job's metadata that all jobs of a run have in common.
        entrypoint: The job's shell command. It has what was typed alone: defaults are those of the head's environment.
        runtime_env: The job's runtime environment: the code, if it is a user's.
    """

    run: dict[str, str]
    entrypoint: str
    runtime_env: dict[str, Any] | None = None


def submission_of_training(flags: Sequence[str]) -> Submission:
    """Return the submission of `python -m training` with these flags.

    Raises:
        UsageError: A flag can't be used.
    """
    config = parse_training(flags).resolve_defaults()
    typed = parse(type(config), flags, {})
    named = [] if typed.run_name else ["--run-name", str(config.run_name)]
    return Submission(run_identity(config, typed), shlex.join(["python", "-m", "training", *flags, *named]))


def submission_of_script(arguments: Sequence[str]) -> Submission:
    """Return the submission of `python -m training.launch` with these arguments.

    Raises:
        UsageError: One can't be used, a file is missing, or the folder with the code is too large.
    """
    config = parse(ScriptConfig, arguments).resolve_defaults()
    config.check_files()
    typed = parse(ScriptConfig, arguments, {})
    on_head = replace(typed, run_name=config.run_name, working_dir=".")
    return Submission(
        run_identity(config, typed), shlex.join(on_head.command_line({})), upload.runtime_env(config.folder)
    )


def run_identity(config: RunConfig, typed: RunConfig) -> dict[str, str]:
    """Return the part of a job's metadata that all jobs of a run have in common.

    A run's name is that of a folder, so under another storage path it is another run. Of the storage path only what was
    typed can be compared, because the default of the head's environment may not be known here.
    """
    return {"run_name": str(config.run_name), "storage_path": typed.storage_path}


def free_id(jobs: dict[str, Any], name: str) -> str:
    """Return `name`, `name.2` or `name.3`...: Ray keeps the jobs that have ended, and takes no ID twice."""
    later = (f"{name}.{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], later) if each not in jobs)


class _Parser(argparse.ArgumentParser):
    """Raises one line instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see python -m training.job --help")


def parse_arguments(given: Sequence[str]) -> tuple[int, Submission]:
    """Return the value of --max-resubmissions, and what the rest says is to be submitted.

    Raises:
        UsageError: An argument can't be used.
    """
    position = list(given).index(LAUNCH) if LAUNCH in given else len(given)
    default = os.environ.get(environment_variable(MAX_RESUBMISSIONS)) or DEFAULT_MAX_RESUBMISSIONS
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-resubmissions", type=_count, default=default)
    own, flags = parser.parse_known_args(given[:position])
    if position == len(given):
        return own.max_resubmissions, submission_of_training(flags)
    if flags:
        raise UsageError(f"{flags[0]}: is not a flag of python -m training.job; give it after {LAUNCH}")
    return own.max_resubmissions, submission_of_script(given[position + 1 :])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number from 0")
    return int(text)


def connect() -> "JobSubmissionClient":
    """Connect to the Jobs API of the head's dashboard, once there is one.

    Ray reads address and token from the environment.

    Raises:
        UsageError: The head refuses the token.
        ResourceError: The address is wrong, or no dashboard answers in time.
    """
    from ray.exceptions import AuthenticationError  # takes seconds: not for --help or a mistyped flag
    from ray.job_submission import JobSubmissionClient

    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    deadline = None
    while True:
        try:
            return JobSubmissionClient(DASHBOARD)
        except AuthenticationError as cause:
            raise UsageError(
                "RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's, and "
                "RAY_AUTH_MODE=token"
            ) from cause
        except (OSError, RuntimeError, ValueError) as cause:
            is_over = deadline is not None and time.monotonic() > deadline
            if is_over or not isinstance(cause, ConnectionError):
                raise ResourceError(
                    f"no dashboard of a Ray head answers ({one_line(cause)}); set RAY_API_SERVER_ADDRESS to the "
                    "address of one"
                ) from cause
            if deadline is None:
                deadline = time.monotonic() + DASHBOARD_SECONDS
                where = os.environ.get("RAY_API_SERVER_ADDRESS", DASHBOARD)
                _say(f"waiting up to {DASHBOARD_SECONDS:.0f} s for the dashboard of the Ray head at {where}")
            time.sleep(RETRY_SECONDS)


def find_or_submit(client: "JobSubmissionClient", work: Submission, metadata: dict[str, str]) -> str:
    """Return the ID of the run's job that is under way, or else submit a new one; print which.

    Raises:
        UsageError: The folder with the code is too large.
        ResourceError: The head accepts no job.
    """
    name = work.run["run_name"]
    attempts = SUBMIT_ATTEMPTS
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            jobs = submitted(client.list_jobs())
            if job_id := under_way(jobs, work.run):
                _say(f"run {name} is under way as job {job_id}: its log from the start")
                return job_id
            job_id = free_id(jobs, name)
            client.submit_job(
                entrypoint=work.entrypoint, submission_id=job_id, metadata=metadata, runtime_env=work.runtime_env
            )
        except (OSError, RuntimeError, ValueError) as cause:
            if work.runtime_env and upload.is_too_large(cause):
                raise upload.too_large(Path(work.runtime_env["working_dir"])) from cause
            attempts -= 1
            if "already exists" in str(cause) and attempts:  # somebody has just submitted a job, perhaps of this run
                continue
            if "try again later" in str(cause) and time.monotonic() < deadline:  # the head has just started
                time.sleep(POLL_SECONDS)
                continue
            raise ResourceError(f"the Ray head accepted no job: {one_line(cause)}") from cause
        _say(f"run {name} is submitted as job {job_id}")
        return job_id


def submitted(listed: list[Any]) -> dict[str, Any]:
    """Return the jobs by ID. Ray lists every driver; one that was not submitted has no ID."""
    return {job.submission_id: job for job in listed if job.submission_id}


def of_run(jobs: dict[str, Any], run: dict[str, str]) -> dict[str, Any]:
    """Return the jobs of a run by ID."""
    return {job_id: job for job_id, job in jobs.items() if run.items() <= (job.metadata or {}).items()}


def under_way(jobs: dict[str, Any], run: dict[str, str]) -> str | None:
    """Return the ID of the run's job that is pending or running, or None."""
    mine = of_run(jobs, run)
    return next((job_id for job_id, job in mine.items() if not job.status.is_terminal()), None)


def _follow(client: "JobSubmissionClient", run: dict[str, str], job_id: str) -> int:
    """Show the logs of the job and of those that the head submits in its place; return the last driver's exit status.

    Raises:
        Interrupted: The user pressed Ctrl-C; the job keeps running.
        TrainingError: The connection was lost for too long, or the driver has no exit status.
    """
    again = f"the same command with --run-name {run['run_name']}"
    logs = UnreadLogs()

    async def show(client: "JobSubmissionClient", of_job: str) -> None:
        nonlocal job_id
        job_id = of_job
        async for text in logs.read(client, job_id):
            print(text, end="", flush=True)

    shown, lost_at = -1, 0.0
    try:
        while True:
            try:
                job_id, job = follow_to_end(client, run, job_id, show)
                break
            except (OSError, RuntimeError, aiohttp.ClientError) as cause:
                if logs.characters > shown:  # the connection was there
                    shown, lost_at = logs.characters, time.monotonic()
                    _say(f"lost the connection to job {job_id} ({one_line(cause)}); connecting again")
                if time.monotonic() - lost_at > DASHBOARD_SECONDS:
                    raise TrainingError(
                        f"lost the connection to job {job_id} ({one_line(cause)}); {again} follows it, or resumes the "
                        "run if the head has lost it"
                    ) from cause
                time.sleep(RETRY_SECONDS)
    except KeyboardInterrupt as stop:
        raise Interrupted(f"job {job_id} keeps running; {again} follows it, ray job stop {job_id} stops it") from stop
    return driver_exit_status(job_id, job, again)


class UnreadLogs:
    """Reads the logs of jobs, each character once: Ray sends a log from its start with each connection."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}

    @property
    def characters(self) -> int:
        """The number of characters read, in all logs together."""
        return sum(self._read.values())

    async def read(self, client: "JobSubmissionClient", job_id: str) -> AsyncIterator[str]:
        """Yield the rest of a job's log, until it ends. A part counts as read when the next one is asked for."""
        end = 0
        async for text in client.tail_job_logs(job_id):
            begin, end = end, end + len(text)
            read = self._read.get(job_id, 0)
            yield text[max(read - begin, 0) :]
            self._read[job_id] = max(read, end)


# Shows a job's log, until it ends.
ShowLog = Callable[["JobSubmissionClient", str], Coroutine[Any, Any, None]]


def follow_to_end(client: "JobSubmissionClient", run: dict[str, str], job_id: str, show: ShowLog) -> tuple[str, Any]:
    """Show the logs of the job and of those that the head submits in its place.

    Returns:
        The ID of the last one, and what Ray reports of it.

    Raises:
        OSError, RuntimeError, aiohttp.ClientError: The connection was lost.
    """
    job = _show_to_end(client, job_id, show)
    while successor := _resubmitted(client, run, job):
        _say(f"job {job_id} lost its driver; the head has submitted run {run['run_name']} again as job {successor}")
        job_id = successor
        job = _show_to_end(client, job_id, show)
    return job_id, job


def _show_to_end(client: "JobSubmissionClient", job_id: str, show: ShowLog) -> Any:
    asyncio.run(show(client, job_id))
    job: Any = client.get_job_info(job_id)
    if not job.status.is_terminal():
        raise ConnectionError("the log ended before the job")
    return job


def _resubmitted(client: "JobSubmissionClient", run: dict[str, str], lost: Any) -> str | None:
    """Wait until the head has submitted the run again if this job lost its driver; return the new ID, or None."""
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
    """Return whether the job failed because its driver or its head died."""
    status = job.driver_exit_code
    return job.status == "FAILED" and (status is None or status < 0 or status > Interrupted.exit_status)


def driver_exit_status(job_id: str, job: Any, again: str) -> int:
    """Return the driver's exit status; print a line if a signal ended it, because then the log doesn't say why.

    Raises:
        TrainingError: The driver has no exit status.
    """
    status = job.driver_exit_code
    if status is None:
        reason = "was stopped" if job.status == "STOPPED" else f"failed ({one_line(job.message or job.error_type)})"
        raise TrainingError(f"job {job_id} {reason}; {again} resumes the run")
    if status < 0:
        print(f"training: job {job_id} was ended by signal {-status}; {again} resumes the run", file=sys.stderr)
        return 128 - status  # as a shell reports a signal
    return status


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
