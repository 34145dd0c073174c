"""A run's log on the screen, from a cluster that is far away: connections break, and are made again."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.status import Status

from ray_on_ecs.cluster import Cluster
from ray_on_ecs.screen import note, out
from training.errors import Interrupted, ResourceError, TrainingError, one_line
from training.job import driver_exit_status, follow_to_end, of_run, submitted, under_way
from training.run import layout

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# How long to try before giving up, from the last time that the log could be read.
LOST_SECONDS = 900.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
PROGRESS_SECONDS = 5.0


class Follower:
    """Shows the log of a run until it ends, each line once.

    Args:
        cluster: Where it runs.
        run: What the metadata of all its jobs have in common.
    """

    def __init__(self, cluster: Cluster, run: dict[str, str]) -> None:
        self._cluster = cluster
        self._run = run
        self._name = run["run_name"]
        # By job, the characters of its log that are shown.
        self._shown: dict[str, int] = {}
        self._line = ""
        self._last_read = time.monotonic()

    def follow(self, job_id: str) -> int:
        """Show the log, also that of the jobs which the head submits in its place; return the driver's exit status.

        Raises:
            Interrupted: The user pressed Ctrl-C; the run goes on.
            UsageError: The head takes the token no more.
            ResourceError: The connection was lost, and could not be made again.
            TrainingError: The job ended without an exit status of its own.
        """
        pause, job = FIRST_PAUSE, None
        try:
            with _ProgressLine(self._cluster, self._name):
                while job is None:
                    try:
                        with self._cluster.connect() as head:
                            pause = FIRST_PAUSE
                            client = head.jobs
                            job_id, job = follow_to_end(client, self._run, self._current(client, job_id), self._show)
                    except (OSError, RuntimeError, aiohttp.ClientError, ResourceError) as cause:
                        self._wait(cause, pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
                self._end_line()
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"run {self._name} goes on as job {job_id}; ray-on-ecs logs --follow {self._name} shows it, "
                f"ray-on-ecs stop {self._name} stops it"
            ) from stop
        return driver_exit_status(job_id, job, f"the same command with --run-name {self._name}")

    def _current(self, client: JobSubmissionClient, job_id: str) -> str:
        """Return the job that has the run now: while nobody looked, the head may have submitted another one."""
        jobs = submitted(client.list_jobs())
        mine = of_run(jobs, self._run)
        latest = max(mine, key=lambda each: mine[each].start_time or 0, default=job_id)
        return under_way(jobs, self._run) or latest

    async def _show(self, client: JobSubmissionClient, job_id: str) -> None:
        read = 0
        async for text in client.tail_job_logs(job_id):
            new = text[max(self._shown.get(job_id, 0) - read, 0) :]
            read += len(text)
            self._shown[job_id] = max(self._shown.get(job_id, 0), read)
            self._last_read = time.monotonic()
            self._print(new)

    def _print(self, text: str) -> None:
        """Print whole lines: a line that is not complete yet would be cut by the progress line."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            out.out(line, highlight=False)

    def _end_line(self) -> None:
        if self._line:
            out.out(self._line, highlight=False)
            self._line = ""

    def _wait(self, cause: Exception, pause: float) -> None:
        if time.monotonic() - self._last_read > LOST_SECONDS:
            raise ResourceError(
                f"lost the connection to run {self._name} ({one_line(cause)}); it goes on without one: "
                f"ray-on-ecs logs --follow {self._name} shows its log"
            ) from cause
        if pause == FIRST_PAUSE:
            note(f"lost the connection ({one_line(cause)}); the run goes on, connecting again")
        time.sleep(pause)


class _ProgressLine:
    """On a terminal, the last line: how far the run is, by the status in its folder. A context."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._over = threading.Event()
        self._status = Status(f"{name}: starting", console=out)
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
            try:
                status = self._cluster.storage(self._name).read_json(layout.STATUS)
            except (TrainingError, OSError):
                continue
            if status:
                self._status.update(f"{self._name}: {progress_words(status)}")


def progress_words(status: dict[str, Any]) -> str:
    """Return in a few words how far a run is."""
    words = [status["state"]]
    if status.get("epoch") is not None and status.get("epochs"):
        words.append(f"epoch {min(status['epoch'] + 1, status['epochs'])}/{status['epochs']}")
    if status.get("step") is not None:
        words.append(f"step {status['step']:,}")
    if status.get("loss") is not None:
        words.append(f"loss {status['loss']:.4f}")
    if status.get("workers"):
        words.append(f"{status['workers']} workers")
    if status.get("cost_usd") is not None:
        words.append(f"{status['cost_usd']:.2f} USD")
    return " · ".join(words)
