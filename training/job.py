"""`python -m training.job`: a run as a job of the Ray head, and whoever starts it follows the log.

The job carries the name of its run: the same command finds it again, and submits another only where none is under way.
What the job does is `python -m training`, with the same flags.
"""

import asyncio
import itertools
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from training.config import parse
from training.errors import Interrupted, ResourceError, TrainingError, UsageError, one_line
from training.recipes.images.config import ImageConfig

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# Where Ray's own variables, RAY_API_SERVER_ADDRESS or RAY_ADDRESS, say nothing else: on the head itself.
DASHBOARD = "http://127.0.0.1:8265"

ABOUT = """\
python -m training.job [flags of python -m training]

Submits python -m training as a Ray job to the cluster's head, shows its log and ends with its exit status. The job
goes on without whoever follows it: while its run is under way, the same command with the same --run-name shows the log
from the start, and later it continues a run that was cut off. Without --run-name it prints the new name that it gives.

RAY_API_SERVER_ADDRESS says where the head's dashboard is (default: http://127.0.0.1:8265); exit status 3 if none
answers. Ctrl-C stops the following, with 130, and not the job. The flags, and the job's own exit status:
"""


def main(arguments: list[str] | None = None) -> int:
    """Submit the run or find it, and follow its log; returns the exit status of its driver."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if not {"-h", "--help"}.isdisjoint(given):
            print(ABOUT)
        config = parse(ImageConfig, given).resolve_defaults()
        client = _connect()
        return _follow(client, _find_or_submit(client, config, given), config)
    except TrainingError as error:
        print(f"training: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("training: interrupted; ray job list shows whether there is a job already", file=sys.stderr)
        return Interrupted.exit_status


def _connect() -> "JobSubmissionClient":
    """The Jobs API of the head's dashboard; Ray takes address and token from the environment."""
    from ray.exceptions import AuthenticationError  # takes seconds: not for --help or a mistyped flag
    from ray.job_submission import JobSubmissionClient

    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)  # it tells how a log was closed
    try:
        return JobSubmissionClient(DASHBOARD)
    except AuthenticationError as cause:
        raise UsageError(
            "RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's, and RAY_AUTH_MODE=token"
        ) from cause
    except (OSError, RuntimeError, ValueError) as cause:
        raise ResourceError(
            f"no dashboard of a Ray head answers ({one_line(cause)}); RAY_API_SERVER_ADDRESS says where one is"
        ) from cause


def _find_or_submit(client: "JobSubmissionClient", config: ImageConfig, given: Sequence[str]) -> str:
    """The job of this run that is under way, or else a new one; says which."""
    name = str(config.run_name)
    # The name of a folder: under another storage path it is another run. Only what was typed can be compared, as the
    # head's own default may not be known here.
    run = {"run_name": name, "storage_path": parse(ImageConfig, given, {}).storage_path}
    try:
        jobs = _submitted(client.list_jobs())
        if job_id := _under_way(jobs, run):
            _say(f"run {name} is under way as job {job_id}: its log from the start")
            return job_id
        job_id = _free_id(jobs, name)
        client.submit_job(entrypoint=_entrypoint(config, given), submission_id=job_id, metadata=run)
    except (OSError, RuntimeError) as cause:
        if "already exists" in str(cause):  # somebody was faster, perhaps with this run
            return _find_or_submit(client, config, given)
        raise ResourceError(f"the Ray head took no job: {one_line(cause)}") from cause
    _say(f"run {name} is submitted as job {job_id}")
    return job_id


def _submitted(listed: list[Any]) -> dict[str, Any]:
    """The jobs by ID. Ray lists every driver; those that nobody submitted have none."""
    return {job.submission_id: job for job in listed if job.submission_id}


def _under_way(jobs: dict[str, Any], run: dict[str, str]) -> str | None:
    """The job of a run that waits or runs, by ID."""
    mine = (job_id for job_id, job in jobs.items() if run.items() <= (job.metadata or {}).items())
    return next((job_id for job_id in mine if not jobs[job_id].status.is_terminal()), None)


def _free_id(jobs: dict[str, Any], name: str) -> str:
    """`name`, then `name.2`, `name.3`: Ray remembers the jobs that have ended, and takes no ID twice."""
    later = (f"{name}.{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], later) if each not in jobs)


def _entrypoint(config: ImageConfig, given: Sequence[str]) -> str:
    """The job's shell command. It has the flags alone: defaults are those of the head's environment."""
    named = [] if parse(ImageConfig, given, {}).run_name else ["--run-name", str(config.run_name)]
    return shlex.join(["python", "-m", "training", *given, *named])


def _follow(client: "JobSubmissionClient", job_id: str, config: ImageConfig) -> int:
    """Show the job's log from its start to its end; the exit status of its driver."""
    again = f"the same command with --run-name {config.run_name}"
    try:
        asyncio.run(_show_log(client, job_id))
        job: Any = client.get_job_info(job_id)
        if not job.status.is_terminal():
            raise ConnectionError("the log ended before the job")
    except KeyboardInterrupt as stop:
        raise Interrupted(f"job {job_id} goes on; {again} follows it, ray job stop {job_id} stops it") from stop
    except (OSError, RuntimeError, aiohttp.ClientError) as cause:
        raise TrainingError(
            f"lost the connection to job {job_id} ({one_line(cause)}); {again} follows it, or continues the run if "
            "the head has gone"
        ) from cause
    return _exit_status(job_id, job, again)


async def _show_log(client: "JobSubmissionClient", job_id: str) -> None:
    async for lines in client.tail_job_logs(job_id):
        print(lines, end="", flush=True)


def _exit_status(job_id: str, job: Any, again: str) -> int:
    """The driver's own; a line where it has none, as then the log can't tell why it ended."""
    if (status := job.driver_exit_code) is not None:
        return status if status >= 0 else 128 - status  # as a shell has it, where a signal ended it
    if job.status == "STOPPED":
        raise TrainingError(f"job {job_id} was stopped; {again} continues the run")
    raise TrainingError(f"job {job_id} failed: {one_line(job.message or job.error_type)}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
