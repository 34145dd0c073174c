"""Log of a run on the screen, with reconnections to the cluster and a progress line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.text import Text

from ray_on_ecs.cli.screen import note, out, show
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.jobs import UnreadLog, driver_exit_status, of_run, resubmitted, say, under_way
from ray_on_ecs.cluster.local_jobs import Jobs
from ray_on_ecs.errors import HeadGone, Interrupted, ResourceError, TrainingError, UsageError, counted, one_line
from ray_on_ecs.node.api import AnswerError, Job
from ray_on_ecs.node.jobs import ENDED
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.shown_log import Filter

# How long to try before giving up.
LOST_SECONDS = 900.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
PROGRESS_SECONDS = 5.0


class Follower:
    """Shows the log of a run until it ends, each line once.

    Args:
        cluster: The cluster of the run.
        run: Metadata that all jobs of the run share.
    """

    def __init__(self, cluster: Cluster, run: dict[str, str]) -> None:
        self._cluster = cluster
        self._run = run
        self._name = run["run_name"]
        self._job = ""
        self._log = UnreadLog()
        self._line = ""
        self._filter = Filter()
        # When the connection was lost, or None while the log is read.
        self._lost_at: float | None = None
        self._pause = FIRST_PAUSE

    def follow(self, job_id: str) -> int:
        """Show the log, also of jobs that the head submits in its place; return the driver's exit status.

        Raises:
            Interrupted: The user pressed Ctrl-C; the run continues.
            UsageError: AWS or the head no longer accepts the credentials; the run continues.
            ResourceError: The connection was lost, and could not be made again.
            TrainingError: The exit status of the driver is unknown, or the head no longer lists the job.
        """
        self._job, job = job_id, None
        try:
            with _ProgressLine(self._cluster, self._name, lambda: self._job):
                while job is None:
                    try:
                        with self._cluster.connect() as head:
                            job = self._follow_at(head)
                    except HeadGone:
                        raise
                    except ResourceError as cause:
                        self._wait(cause)
                if self._line:
                    show(self._filter.shown([self._line]))
        except KeyboardInterrupt as stop:
            raise Interrupted(f"{self._goes_on}, {self._cluster.command(f'stop {self._name}')} stops it") from stop
        except UsageError as cause:
            raise UsageError(f"{cause}; {self._goes_on}") from cause
        storage = self._cluster.storage(self._name)
        return driver_exit_status(self._job, job, storage, lambda: way_on(self._cluster, self._name))

    @property
    def _goes_on(self) -> str:
        shows = self._cluster.command(f"logs --follow {self._name}")
        return f"run {self._name} continues as job {self._job}: {shows} shows its log"

    def _follow_at(self, head: Jobs) -> Job:
        """Show the log as long as this head answers; return what Ray reports of the last job.

        Raises:
            TrainingError: The head doesn't know the run.
        """
        jobs = of_run(head.submitted_jobs(), self._run)
        if not jobs:
            raise TrainingError(
                f"the head no longer lists run {self._name}; the same command with --run-name {self._name} resumes it"
            )
        # Meanwhile the head may have submitted another job.
        self._begin(under_way(jobs, self._run) or list(jobs)[-1])
        while True:
            self._log.connect()
            head.tail(self._job, self._show)
            job = head.job(self._job)
            if job["status"] not in ENDED:
                raise ResourceError("the log ended before the job")
            successor = resubmitted(head, self._run, job)
            if successor is None:
                return job
            say(f"job {self._job} lost its driver; the head has submitted run {self._name} again as job {successor}")
            self._begin(successor)

    def _begin(self, job_id: str) -> None:
        if job_id != self._job:
            self._job, self._log = job_id, UnreadLog()

    def _show(self, text: str) -> None:
        """Print whole lines of what is new: the progress line would cut a line that is not complete yet."""
        self._lost_at, self._pause = None, FIRST_PAUSE
        *lines, self._line = (self._line + self._log.rest(text)).split("\n")
        show(self._filter.shown(lines))

    def _wait(self, cause: ResourceError) -> None:
        now = time.monotonic()
        reason = cause.reason if isinstance(cause, AnswerError) else one_line(cause)
        if self._lost_at is None:
            self._lost_at = now
            note(f"lost the connection ({reason}); connecting again")
        if now - self._lost_at > LOST_SECONDS:
            raise ResourceError(f"lost the connection ({reason}); {self._goes_on}") from cause
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


def way_on(cluster: Cluster, name: str) -> str:
    """Return what is kept of a run that was stopped or killed, and how it continues."""
    from ray_on_ecs.config import RunConfig
    from ray_on_ecs.run import document
    from ray_on_ecs.run.files.newest import has_stored, newest_stored, nothing_stored_line

    again = f"the same command with --run-name {name}"
    with suppress(OSError, UsageError, ValueError):
        storage = cluster.storage(name)
        settings = document.read_earlier(cluster.document_storage(storage)).get("settings", {})
        config = RunConfig(driver=settings.get("driver") is True)
        if newest := newest_stored(config, storage):
            how = "resumes it from" if newest.is_loaded else "starts it with its files, the newest is"
            return f"{again} {how} {newest}"
        if not has_stored(config, storage):
            return nothing_stored_line(name)
    return f"{again} resumes it"


def progress_words(status: dict[str, Any]) -> str:
    """Return in a few words how far a run is."""
    words = [f"queued behind {status['behind']}" if status.get("behind") else status["state"]]
    if status.get("step") is not None:
        words.append(f"step {status['step']:,}")
    if status.get("loss") is not None:
        words.append(f"loss {status['loss']:.4f}")
    if status.get("workers"):
        words.append(counted(status["workers"], "worker"))
    if status.get("cost_usd") is not None:
        words.append(f"{status['cost_usd']:.2f} USD")
    return " · ".join(words)
