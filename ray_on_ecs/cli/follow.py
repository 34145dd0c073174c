"""Log of a run on the screen, with a progress line; it goes on where it was once the head or S3 answers again."""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from rich.text import Text

from ray_on_ecs.cli.screen import note, out, show
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.jobs import Jobs, driver_exit_status, of_run, resubmitted, say
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError, counted, one_line, resume_line
from ray_on_ecs.jobs.record import ENDED, Job, under_way
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.end import cost, end_in, steps
from ray_on_ecs.tracking.shown_log import Filter

OF_STOP = re.compile("ray-on-ecs: stopped; ")
# How long to try before giving up.
LOST_SECONDS = 900.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
PROGRESS_SECONDS = 5.0
# How long the rest of a log may take, once its job has ended.
LAST_SECONDS = 5.0


class Follower:
    """Shows the log of a run until it ends, each line once; `run` is the metadata that all its jobs share.

    `skipped` is the number of lines at the start of the first job's log that are not shown.
    """

    def __init__(self, cluster: Cluster, jobs: Jobs, run: dict[str, str], skipped: int = 0) -> None:
        self._cluster, self._jobs, self._skipped = cluster, jobs, skipped
        self._run = run
        self._name = run["run_name"]
        self._job = ""
        self._offset = 0  # bytes of its log that were read
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # the last character may be half written
        self._line = ""
        self._filter = Filter()
        # When the connection was lost, or None while the log is read.
        self._lost_at: float | None = None
        self._pause = FIRST_PAUSE

    def follow(self, job_id: str) -> int:
        """Show the log, also of jobs that the head submits in its place; return the driver's exit status.

        The run goes on after Interrupted (Ctrl-C), UsageError (the credentials are no longer accepted) and
        ResourceError (the connection was lost). TrainingError if the exit status is unknown, or the head no longer
        lists the job.
        """
        self._job, job = job_id, None
        try:
            with _ProgressLine(self._cluster, self._name, lambda: self._job):
                while job is None:
                    try:
                        job = self._follow()
                    except ResourceError as cause:
                        self._wait(cause)
                self._end_line()
        except KeyboardInterrupt as stop:
            raise Interrupted(f"{self._goes_on}, {self._cluster.command(f'stop {self._name}')} stops it") from stop
        except UsageError as cause:
            raise UsageError(f"{cause}; {self._goes_on}") from cause
        storage = self._cluster.storage(self._name)
        return driver_exit_status(self._job, job, storage, lambda: way_on(self._cluster, self._name))

    @contextmanager
    def beside(self) -> Generator[None]:
        """Go on with the log of the job until the block, which stops it, ends without an error.

        The driver's last line is left out: a command that stops a run says more of it.
        """
        self._filter = Filter(OF_STOP)

        def show_rest() -> None:
            with suppress(ResourceError):  # the end of the run is of more interest
                self._jobs.tail(self._job, self._show, self._offset)
                self._end_line()

        thread = threading.Thread(target=show_rest, name="log", daemon=True)
        thread.start()
        yield
        thread.join(LAST_SECONDS)

    @property
    def _goes_on(self) -> str:
        shows = self._cluster.command(f"logs --follow {self._name}")
        return f"run {self._name} continues as job {self._job}: {shows} shows its log"

    def _follow(self) -> Job:
        """Show the log while the storage answers; return the last job, TrainingError if the run is not listed."""
        held = self._jobs
        listed = held.list_jobs()
        jobs = of_run(listed, self._run)
        if not jobs:
            raise TrainingError(f"the head no longer lists run {self._name}; {resume_line(self._name)}")
        if self._job not in jobs:  # a request that the head has accepted meanwhile, or a job that it has forgotten
            active = under_way(listed, self._run)
            self._begin(active["submission_id"] if active else list(jobs)[-1])
        while True:
            held.tail(self._job, self._show, self._offset)
            job = held.job(self._job)
            self._job = job["submission_id"]  # in the place of a request's ID
            if job["status"] not in ENDED:
                raise ResourceError("the log ended before the job")
            successor = resubmitted(held, self._run, job)
            if successor is None:
                return held.job(self._job)  # a user may have stopped it meanwhile
            lost = self._job
            self._begin(successor)
            say(f"job {lost} lost its driver; the head has submitted run {self._name} again as job {successor}")

    def _begin(self, job_id: str) -> None:
        self._end_line()
        self._job, self._offset, self._skipped = job_id, 0, 0
        self._decoder.reset()

    def _end_line(self) -> None:
        """Print a line that is not complete: its driver has ended."""
        if self._line:
            show(self._filter.shown([self._line]))
        self._line = ""

    def _show(self, part: bytes) -> None:
        """Print whole lines: the progress line would cut a line that is not complete yet."""
        self._lost_at, self._pause = None, FIRST_PAUSE
        self._offset += len(part)
        *lines, self._line = (self._line + self._decoder.decode(part)).split("\n")
        shown = list(self._filter.shown(lines))
        show(shown[self._skipped :])
        self._skipped = max(self._skipped - len(shown), 0)

    def _wait(self, cause: ResourceError) -> None:
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            note(f"waiting for the log ({one_line(cause)})")
        if now - self._lost_at > LOST_SECONDS:
            raise ResourceError(f"the log can't be read ({one_line(cause)}); {self._goes_on}") from cause
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class _ProgressLine:
    """On a terminal, the last line: how far the run is, by the status in its folder. A context."""

    def __init__(self, cluster: Cluster, name: str, job: Callable[[], str]) -> None:
        self._cluster, self._name, self._job = cluster, name, job
        self._over = threading.Event()
        self._status = out.status(f"{name}: starting")
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> None:
        if out.is_terminal:
            self._status.start()
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._status.stop()

    def _watch(self) -> None:
        while not self._over.wait(PROGRESS_SECONDS):
            with suppress(Exception):  # a document that is broken, or a storage that does not answer
                status = self._cluster.storage(self._name).read_json(layout.STATUS)
                if status and status["job"] == self._job():  # else it is an earlier command's
                    self._status.update(Text(f"{self._name}: {progress_words(status)}"))


def way_on(cluster: Cluster, name: str, command: str = "the same command") -> str:
    """Return what is kept of a run that was stopped or killed, and the command that resumes it."""
    from ray_on_ecs.run import document
    from ray_on_ecs.run.files.newest import has_stored, newest_stored, nothing_stored_line

    with suppress(OSError, UsageError, ValueError):
        storage = cluster.storage(name)
        settings = document.read_earlier(cluster.document_storage(storage)).get("settings", {})
        config = RunConfig(driver=settings.get("driver") is True)
        if newest := newest_stored(config, storage):
            how = "resumes it from" if newest.is_loaded else "starts it with its files, the newest is"
            return f"{command} with --run-name {name} {how} {newest}"
        if not has_stored(config, storage):
            return nothing_stored_line(name, command)
    return resume_line(name, command)


def progress_words(status: dict[str, Any]) -> str:
    """Return in a few words how far a run is."""
    of_pool = f" in pool {status['line']}" if status.get("line") else ""
    words = [f"queued behind {status['behind']}{of_pool}" if status.get("behind") else status["state"]]
    end = end_in(status, is_training=status["state"] == "training")
    if end:
        words.append(steps(end))
    if status.get("loss") is not None:
        words.append(f"loss {status['loss']:.4f}")
    if status.get("workers"):
        words.append(counted(status["workers"], "worker"))
    if end and end.usd is not None:
        words.append(cost(end))
    elif status.get("cost_usd") is not None:
        words.append(f"{status['cost_usd']:.2f} USD")
    return " · ".join(words)
