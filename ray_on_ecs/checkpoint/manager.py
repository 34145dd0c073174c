"""When checkpoints are taken, on all ranks at the same steps; plain PyTorch, under Ray, under torchrun and alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.manifest import Manifest, find_fault
from ray_on_ecs.checkpoint.preemption import Preemption
from ray_on_ecs.checkpoint.resume import check_data_unchanged
from ray_on_ecs.checkpoint.saver import AsyncSaver, log
from ray_on_ecs.checkpoint.store import CheckpointStore
from ray_on_ecs.checkpoint.trainer import CheckpointOptions, Trainer
from ray_on_ecs.errors import StorageError, counted
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import: not before the first checkpoint
    from ray_on_ecs.checkpoint.snapshot import Snapshot

POLL_SECONDS = 1.0
# How long a failing rank waits for the save in progress. If another rank failed, Ray kills this one sooner.
LAST_SECONDS = 60.0


class Preempted(Exception):
    """Nodes are being reclaimed; the checkpoint is saved, and every rank has to return.

    Attributes:
        ranks: The workers on those nodes.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"the nodes of ranks {ranks} are being reclaimed")
        self.ranks = ranks


@dataclass(frozen=True)
class Decision:
    """What all ranks do about checkpoints between two steps, as rank 0 says.

    Attributes:
        start_pending: Start to store the pending snapshot.
        take: Take a snapshot to store it `now`, or `later`; or None.
        poll_after: After how many steps the ranks poll again.
        error: Why the run ends.
    """

    start_pending: bool
    take: Literal["now", "later"] | None
    poll_after: int
    error: str | None


class SaveSchedule:
    """Says when the ranks poll, about once per second, and when a checkpoint is due within an epoch.

    Args:
        checkpoint_seconds: The time between two checkpoints.

    Attributes:
        steps_until_poll: The same on all ranks.
    """

    def __init__(self, checkpoint_seconds: float) -> None:
        self._checkpoint_seconds = checkpoint_seconds
        self._poll_seconds = min(POLL_SECONDS, checkpoint_seconds)
        self._poll_every_steps = 1
        self.steps_until_poll = 1
        self.saved()

    def step(self) -> bool:
        """Count a step; returns whether the ranks poll after it."""
        self.steps_until_poll -= 1
        return self.steps_until_poll <= 0

    def due(self) -> bool:
        """Return whether a checkpoint is due."""
        return time.monotonic() - self._saved_at >= self._checkpoint_seconds

    def steps_to_poll(self) -> int:
        """Return after how many steps to poll again, from the time that the steps since the last poll took."""
        now = time.monotonic()
        wanted = self._poll_every_steps * self._poll_seconds / max(now - self._polled_at, 1e-6)
        self._poll_every_steps = max(1, min(2 * self._poll_every_steps, round(wanted)))
        self._polled_at = now
        return self._poll_every_steps

    def saved(self) -> None:
        """Note that a checkpoint is taken or loaded now."""
        self._saved_at = self._polled_at = time.monotonic()


class CheckpointManager:
    """Takes a run's checkpoints; a context, within which the run trains. Every rank must make one.

    Rank 0 decides when, and a thread of each rank stores its part, see `AsyncSaver`. Training pauses for the copy only:
    an epoch that ends while a checkpoint is being stored leaves a pending snapshot, of which there is at most one. A
    newer one replaces it, unless the pending one has the best score so far.

    Args:
        trainer: The training.
        storage: The run's folder.
        config: The run's settings.
        score: The metric that decides which checkpoint is the best; higher is better.
        preemption: Returns the nodes that are being reclaimed, or None; the same on all ranks, which call it at the
            same steps.
        heartbeat: Called now and then while a checkpoint is read, and while training waits for one to be stored.
        on_epoch_saved: Called with the history after each epoch, on rank 0's saving thread; may raise OSError. If
            epochs end faster than it returns, it is called for several at once.

    Attributes:
        blocked_seconds: How long training has paused for checkpoints.
    """

    def __init__(
        self,
        trainer: Trainer,
        storage: RunStorage,
        config: CheckpointOptions,
        *,
        score: str,
        preemption: Callable[[], Preemption | None] = lambda: None,
        heartbeat: Callable[[], None] = lambda: None,
        on_epoch_saved: Callable[[list[Any]], None] = lambda history: None,
    ) -> None:
        self._trainer = trainer
        self._storage = storage
        self._preemption = preemption
        self._heartbeat = heartbeat
        self._score = score
        self._ranks = Collectives()
        self._store = CheckpointStore(storage, config.keep_checkpoints, score, log) if trainer.rank == 0 else None
        self._data = dict(trainer.data_summary)
        self._saver = AsyncSaver(self._ranks, storage, config, self._store, self._data, self._beat, on_epoch_saved)
        self._schedule = SaveSchedule(config.checkpoint_seconds)
        self._saved_step = trainer.step
        self.blocked_seconds = 0.0

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
            elif kind is not Preempted:
                with suppress(Exception):  # the error at hand says more
                    self._saver.wait(time.time() + LAST_SECONDS)
        finally:
            self._saver.close()
            self._ranks.close()

    @property
    def summary(self) -> dict[str, Any]:
        """On rank 0 the `last` checkpoint, the `best` with its epoch, and the seconds that training paused for them."""
        if self._store is None:
            return {}
        best = str(self._store.best)
        return {
            "last": self._store.names[-1],
            "best": best,
            "best_epoch": self._store.epochs(best) - 1,
            "blocked_seconds": self.blocked_seconds,
        }

    @property
    def save_in_progress(self) -> bool:
        """Whether a checkpoint is being stored."""
        return self._saver.save_in_progress

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one.

        Raises:
            UsageError: It was trained on other data.
        """
        trainer = self._trainer
        if found := self._find():
            from ray_on_ecs.checkpoint.snapshot import load

            name, manifest = found
            check_data_unchanged(self._storage, manifest["data"], self._data)
            load(trainer, self._storage, name, manifest["world_size"], self._beat)
            if trainer.rank == 0:
                steps = trainer.step % trainer.steps_per_epoch
                log(f"resuming from {name}: {counted(trainer.epoch, 'epoch')} and {counted(steps, 'step')} are done")
        self._saved_step = trainer.step
        self._schedule.saved()

    def step(self, step: int, steps: int) -> None:
        """Take a checkpoint if one is due after this step of the epoch.

        Raises:
            Preempted: Nodes are being reclaimed.
            StorageError: Too many in a row could not be stored.
        """
        if self._schedule.step() and step < steps:  # the end of an epoch has a checkpoint of its own
            self.exit_if_preempted()
            poll_after = self._schedule.steps_to_poll()
            self._follow(self._decide(self._schedule.due(), poll_after, may_wait=False))

    def save(self) -> None:
        """Take a checkpoint, to be stored now or after the one that is being stored.

        Raises:
            StorageError: Too many in a row could not be stored.
        """
        self._follow(self._decide(True, self._schedule.steps_until_poll, may_wait=True))
        if self._store is not None and self._trainer.history and not self._trainer.in_epoch:
            self._saver.report_epoch(list(self._trainer.history))

    def exit_if_preempted(self) -> None:
        """Store a checkpoint and raise Preempted if nodes are being reclaimed."""
        if (preemption := self._preemption()) is None:
            return
        self._flush(preemption.deadline)
        if self._store is not None:
            self._report_unsaved(self._store)
            log(f"ranks {preemption.ranks} are being preempted; stopped after step {self._trainer.step}")
        raise Preempted(preemption.ranks)

    def _decide(self, wanted: bool, poll_after: int, may_wait: bool) -> Decision:
        """Decide, on rank 0, whether to take a checkpoint that is wanted."""
        busy = self._saver.save_in_progress
        start_pending = self._saver.pending is not None and not busy
        take: Literal["now", "later"] | None = None
        if wanted and self._saved_step != self._trainer.step:
            if not busy and not start_pending:
                take = "now"
            elif may_wait and (start_pending or not self._best_is_pending()):
                take = "later"
        return Decision(start_pending, take, poll_after, self._saver.error)

    def _follow(self, decision: Decision) -> None:
        """Do what rank 0 has decided."""
        began = time.monotonic()
        decision = self._ranks.broadcast(decision)
        if decision.error:
            raise StorageError(decision.error)
        self._schedule.steps_until_poll = decision.poll_after
        if decision.start_pending:
            self._saver.start_pending()
        if decision.take == "now":
            self._saver.start(self._take())
        elif decision.take == "later":
            self._saver.pending = self._take()
        if decision.take:
            self.blocked_seconds += time.monotonic() - began

    def _take(self) -> Snapshot:
        from ray_on_ecs.checkpoint.snapshot import take

        snapshot = take(self._trainer, self._ranks)
        self._saved_step = snapshot.step
        self._schedule.saved()
        return snapshot

    def _best_is_pending(self) -> bool:
        """Return whether the pending snapshot ends the epoch with the highest score so far."""
        if (pending := self._saver.pending) is None or not pending.ends_epoch:
            return False
        scores = [metrics[self._score] for metrics in self._trainer.history]
        return scores.index(max(scores)) == len(pending.history) - 1

    def _flush(self, deadline: float = float("inf")) -> None:
        """Store the state as it is now, and before it a pending snapshot, until the deadline (Unix time)."""
        may_retry = True
        while (action := self._ranks.broadcast(self._next_action(deadline, may_retry))) != "return":
            if action == "start pending":
                self._saver.start_pending()
            elif action == "take":
                self._saver.start(self._take())
            elif action == "retry":
                may_retry = False
                self._saver.wait()  # for the outcome, which rank 0 has
                self._saver.retry()
            self._saver.wait(deadline)

    def _next_action(self, deadline: float, may_retry: bool) -> str:
        """Return what there is left to do, on rank 0."""
        if time.time() >= deadline:
            return "return"
        if self._saver.save_in_progress:
            return "wait"
        if self._saver.pending:
            return "start pending"
        if self._saved_step != self._trainer.step:
            return "take"
        return "retry" if self._saver.unsaved and may_retry else "return"

    def _finish(self) -> None:
        """Store what is missing of a run that has ended, and its weights.

        Raises:
            StorageError: The last checkpoint could not be stored.
        """
        self._flush()
        self._saver.check_saved()
        if self._store is not None and self._store.best:
            self._store.export(self._store.names[-1], layout.WEIGHTS, self._beat)
            self._store.export(self._store.best, layout.BEST_WEIGHTS, self._beat)

    def _find(self) -> tuple[str, Manifest] | None:
        """Return the newest checkpoint whose files are as they were written; each rank reads some of them."""
        ranks = self._ranks
        while found := ranks.broadcast(self._store.newest if self._store else None):
            name, manifest = found
            files = sorted(manifest["files"])[ranks.rank :: ranks.world_size]
            fault = find_fault(self._storage, name, manifest["files"], files, self._beat)
            faults = [each for each in ranks.broadcast(ranks.gather(fault)) if each]
            if not faults:
                return found
            if self._store is not None:
                self._store.discard(name, faults[0])
        return None

    def _beat(self) -> None:
        with suppress(Exception):  # whoever watches the run may be gone
            self._heartbeat()

    def _report_unsaved(self, store: CheckpointStore) -> None:
        """Say that a preemption came too late for a checkpoint, if it did."""
        newest = store.names[-1] if store.names else "the start"
        if self._trainer.step and newest != (name := layout.checkpoint_name(self._trainer.step)):
            seconds = self._saver.seconds
            speed = "" if seconds is None else f" (the last one took {seconds:.0f} s)"
            log(f"{name} could not be stored before the deadline{speed}; the run will resume from {newest}")
