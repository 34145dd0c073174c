"""A thread on each rank that stores checkpoints while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.store import CheckpointStore
from ray_on_ecs.checkpoint.trainer import CheckpointOptions
from ray_on_ecs.config import flag
from ray_on_ecs.errors import StorageError, counted
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.tracking.storage import RunStorage

if TYPE_CHECKING:
    from ray_on_ecs.checkpoint.snapshot import Part, Snapshot

HEARTBEAT_SECONDS = 1.0


class AsyncSaver:
    """Stores snapshots, one at a time.

    Each rank's thread writes its part and tells rank 0's what that is; rank 0's makes a checkpoint of the parts and
    tells the others whether that worked. All ranks must start the same snapshots in the same order.

    Args:
        ranks: All ranks.
        storage: The run's folder.
        config: The run's settings.
        store: The checkpoints in that folder, on rank 0.
        data: What their manifests say of the data set.
        heartbeat: Called about once per second while somebody waits.
        on_epoch_saved: Called on rank 0's thread with the history; may raise OSError.

    Attributes:
        pending: A snapshot that is not started yet, because another one is being stored.
        unsaved: The last snapshot, if it could not be stored.
        seconds: How long the last save took, successful or not.
    """

    def __init__(
        self,
        ranks: Collectives,
        storage: RunStorage,
        config: CheckpointOptions,
        store: CheckpointStore | None,
        data: dict[str, Any],
        heartbeat: Callable[[], None],
        on_epoch_saved: Callable[[list[Any]], None],
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._config = config
        self._store = store
        self._data = data
        self._heartbeat = heartbeat
        self._on_epoch_saved = on_epoch_saved
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._save: Future[None] | None = None
        self._report: Future[None] | None = None
        self._started_at = time.monotonic()
        self._saves = 0
        self._failures: list[str] = []
        self._history: list[Any] | None = None
        self.pending: Snapshot | None = None
        self.unsaved: Snapshot | None = None
        self.seconds: float | None = None

    @property
    def save_in_progress(self) -> bool:
        """Whether a checkpoint is being stored."""
        return self._save is not None and not self._save.done()

    @property
    def error(self) -> str | None:
        """Why the run must end: more snapshots in a row than allowed could not be stored."""
        if len(self._failures) <= self._config.max_failed_checkpoints:
            return None
        return f"{counted(len(self._failures), 'checkpoint')} in a row could not be stored ({self._failures[-1]})"

    def start(self, snapshot: Snapshot) -> None:
        """Store a snapshot, in the thread."""
        self.raise_bugs()
        self.unsaved = None  # it is outdated
        self._started_at = time.monotonic()
        self._save = self._thread.submit(self._save_in_thread, snapshot)

    def start_pending(self) -> None:
        """Store the pending snapshot."""
        assert self.pending is not None
        self.start(self.pending)
        self.pending = None

    def retry(self) -> None:
        """Store the snapshot again that could not be stored."""
        assert self.unsaved is not None
        self.start(self.unsaved)

    def report_epoch(self, history: list[Any]) -> None:
        """Call `on_epoch_saved`, in the thread; once for several epochs if they end while it is busy."""
        self.raise_bugs()
        self._history = history
        self._report = self._thread.submit(self._report_in_thread)

    def wait(self, deadline: float = float("inf")) -> None:
        """Wait until nothing is being stored, or until the deadline (Unix time).

        Heartbeats end after `--hang-timeout`, so that a hung disk is still found to be a stall.
        """
        while (jobs := self._unfinished()) and (seconds := deadline - time.time()) > 0:
            wait_for(jobs, timeout=min(HEARTBEAT_SECONDS, seconds))
            if time.monotonic() - self._started_at < self._config.hang_timeout:
                self._heartbeat()
        self.raise_bugs()

    def check_saved(self) -> None:
        """Raise StorageError if the last snapshot could not be stored."""
        if self.unsaved:
            raise StorageError(f"the last checkpoint could not be stored ({self._failures[-1]})")

    def raise_bugs(self) -> None:
        """Raise the exception that ended a job of the thread, if there is one; failures to store are none."""
        for job in (self._save, self._report):
            if job and job.done():
                job.result()

    def close(self) -> None:
        """Take no more jobs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _unfinished(self) -> list[Future[None]]:
        return [job for job in (self._save, self._report) if job and not job.done()]

    def _save_in_thread(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        failure = self._store_snapshot(snapshot)
        self.seconds = time.monotonic() - began
        if failure is None:
            self._failures.clear()
            self.unsaved = None
            return
        self._failures.append(failure)
        self.unsaved = snapshot
        limit = f"{flag('max_failed_checkpoints')} is {self._config.max_failed_checkpoints}"
        self._log(
            f"the checkpoint of step {snapshot.step} could not be stored ({failure}); training continues: "
            f"{len(self._failures)} in a row failed, {limit}"
        )

    def _store_snapshot(self, snapshot: Snapshot) -> str | None:
        """Store a snapshot together with the other ranks' threads; returns what went wrong, the same on all ranks."""
        self._saves += 1
        parts, outcome = f"{self._saves}/part", f"{self._saves}/outcome"
        try:
            self._ranks.send(0, f"{parts}/{self._ranks.rank}", self._write(snapshot))
            if self._ranks.rank > 0:
                return self._ranks.receive(outcome)
            failure = self._complete(
                snapshot, [self._ranks.receive(f"{parts}/{rank}") for rank in range(self._ranks.world_size)]
            )
            for rank in range(1, self._ranks.world_size):
                self._ranks.send(rank, outcome, failure)
        except OSError as cause:
            return short_reason(cause)
        return failure

    def _write(self, snapshot: Snapshot) -> Part | str:
        """Write this rank's part; returns what it is, or what went wrong."""
        try:
            return snapshot.write(self._storage)
        except OSError as cause:
            return short_reason(cause)

    def _complete(self, snapshot: Snapshot, parts: list[Part | str]) -> str | None:
        assert self._store is not None
        try:
            self._store.complete(snapshot, parts, self._data)
        except OSError as cause:
            return short_reason(cause)
        return None

    def _report_in_thread(self) -> None:
        history = self._history
        self._history = None
        if history is None:  # a report that came later has written these epochs, too
            return
        try:
            self._on_epoch_saved(history)
        except OSError as cause:  # the next epoch writes them all
            self._log(f"the metrics could not be stored ({short_reason(cause)}); training continues")

    def _log(self, line: str) -> None:
        if self._ranks.rank == 0:
            log(line)


def log(line: str) -> None:
    """Print a line to the worker's log."""
    print(f"ray-on-ecs: {line}", flush=True)
