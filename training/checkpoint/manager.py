"""When checkpoints are taken, and how they are stored while training goes on; plain PyTorch, on every rank alike.

All ranks take a checkpoint at the same step. Which one that is, rank 0's clock says: about once a second it tells the
others whether a checkpoint is due. A thread of rank 0 stores it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from training.checkpoint import store
from training.checkpoint.snapshot import Snapshot, load, take
from training.checkpoint.store import CheckpointStore
from training.config import RunConfig, flag
from training.engine.trainer import Trainer
from training.errors import StorageError
from training.run.storage import RunStorage, short_reason

LOOK_SECONDS = 1.0
# What a rank that fails waits for the checkpoint that is on its way; when others fail, Ray does not wait so long.
LAST_SECONDS = 60.0


@dataclass(frozen=True)
class Preemption:
    """Nodes that are being reclaimed.

    Attributes:
        ranks: The workers on them.
        deadline: When everything must be saved (Unix time).
    """

    ranks: list[int]
    deadline: float


class Preempted(Exception):
    """Nodes are being reclaimed; the checkpoint is saved, and every rank has to return.

    Attributes:
        ranks: The workers on those nodes.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"the nodes of ranks {ranks} are being reclaimed")
        self.ranks = ranks


class CheckpointManager:
    """Keeps one run's checkpoints; a context, within which it trains.

    Args:
        trainer: What is trained.
        storage: The run's folder.
        config: The run's settings.
        score: The metric that decides which checkpoint is the best; higher is better.
        preemption: Returns the nodes that are being reclaimed, or None; the same on all ranks, which call it at the
            same steps.
        heartbeat: Called now and then while the training waits for a checkpoint.
        on_epoch_saved: Called with the history after each checkpoint that ends an epoch, on rank 0's saving thread; may
            raise OSError.
    """

    def __init__(
        self,
        trainer: Trainer,
        storage: RunStorage,
        config: RunConfig,
        *,
        score: str,
        preemption: Callable[[], Preemption | None] = lambda: None,
        heartbeat: Callable[[], None] = lambda: None,
        on_epoch_saved: Callable[[list[Any]], None] = lambda history: None,
    ) -> None:
        self._trainer, self._storage, self._config = trainer, storage, config
        self._score = score
        self._preemption = preemption
        self._heartbeat = heartbeat
        self._on_epoch_saved = on_epoch_saved
        self._store: CheckpointStore | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._storing: Future[None] | None = None
        self._lost: list[str] = []
        self._unstored: Snapshot | None = None
        self._saved = -1
        self._last = self._looked = self._began = time.monotonic()
        self._between = self._left = 1
        self.waited = 0.0

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
            else:
                with suppress(Exception):  # the error at hand says more
                    self._wait(LAST_SECONDS)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def summary(self) -> dict[str, Any]:
        """On rank 0 the `last` checkpoint, the `best` with its epoch, and the seconds that training stood for them."""
        if self._store is None:
            return {}
        last, best = self._store.names[-1], self._store.best
        return {
            "last": last,
            "best": best,
            "best_epoch": self._store.epochs(str(best)) - 1,
            "blocked_seconds": self.waited,
        }

    @property
    def storing(self) -> bool:
        """On rank 0, whether a checkpoint is being stored."""
        return self._storing is not None and not self._storing.done()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        trainer = self._trainer
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            if name := self._fetch(Path(folder)):
                load(trainer, Path(folder))
        if name and trainer.rank == 0:
            steps = trainer.step % trainer.steps_per_epoch
            _say(f"resuming from {name}: {trainer.epoch} epochs and {steps} steps are done")
        self._last = self._looked = time.monotonic()

    def step(self, step: int, steps: int) -> None:
        """After each step: take a checkpoint if one is due.

        Raises:
            Preempted: A worker will be taken away.
        """
        self._left -= 1
        if self._left <= 0 and step < steps:  # the end of an epoch has one of its own
            self._look()

    def save(self, seconds: float = float("inf")) -> None:
        """Take a checkpoint and let it be stored, after the one before, for which it waits so many seconds.

        Raises:
            StorageError: Too many in a row could not be stored.
        """
        began = time.monotonic()
        self._wait(seconds)
        self._check()
        if snapshot := take(self._trainer):
            self._store_beside(snapshot)
        self._saved = self._trainer.step
        self._last = time.monotonic()
        self.waited += self._last - began

    def exit_if_preempted(self) -> None:
        """Store a checkpoint and raise Preempted if a worker will be taken away."""
        if (preemption := self._preemption()) is None:
            return
        deadline = preemption.deadline
        if self._saved != self._trainer.step:
            self.save(deadline - time.time())
        self._wait(deadline - time.time())
        if time.time() < deadline:
            self._store_again(deadline - time.time())
        if dist.is_initialized():
            dist.barrier()
        if self._trainer.rank == 0:
            _say(f"ranks {preemption.ranks} are being preempted; stopped after step {self._trainer.step}")
        raise Preempted(preemption.ranks)

    def _look(self) -> None:
        self.exit_if_preempted()
        due, self._left = self._agreed()
        if due:
            self.save()

    def _agreed(self) -> tuple[bool, int]:
        """Whether a checkpoint is due and after how many steps to look again, as rank 0 says."""
        now = time.monotonic()
        seconds = min(LOOK_SECONDS, self._config.checkpoint_seconds)
        wanted = self._between * seconds / max(now - self._looked, 1e-6)
        self._between = max(1, min(2 * self._between, round(wanted)))
        self._looked = now
        due = not self.storing and now - self._last >= self._config.checkpoint_seconds
        said = torch.tensor([int(due), self._between], device=self._trainer.device)
        if dist.is_initialized():
            dist.broadcast(said, src=0)
        due, left = said.tolist()
        return bool(due), left

    def _fetch(self, folder: Path) -> str | None:
        """Fetch the newest whole checkpoint, which rank 0 chooses, to this rank's machine; its name."""
        rank = self._trainer.rank
        chosen: list[tuple[str, store.Manifest] | None] = [None]
        if rank == 0:
            self._store = CheckpointStore(self._storage, self._config.keep_checkpoints, self._score, _say)
            chosen = [self._store.fetch(folder)]
        if dist.is_initialized():
            dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            return None
        name, manifest = chosen[0]
        if rank and (fault := store.fetch(self._storage, name, manifest, folder)):
            raise StorageError(f"{name} could be read on rank 0 and not on rank {rank} ({fault})")
        return name

    def _put(self, snapshot: Snapshot) -> None:
        """On rank 0's thread: store a checkpoint, and with it what else an epoch leaves."""
        assert self._store is not None
        try:
            with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
                self._store.put(snapshot, Path(folder))
            self._lost.clear()
            self._unstored = None
        except OSError as cause:
            self._unstored = snapshot
            self._lost.append(short_reason(cause))
            failed = len(self._lost)
            limit = f"{flag('max_failed_checkpoints')} is {self._config.max_failed_checkpoints}"
            _say(
                f"the checkpoint of step {snapshot.step} could not be stored ({self._lost[-1]}); training continues: "
                f"{failed} in a row failed, {limit}"
            )

        if snapshot.ended:
            try:
                self._on_epoch_saved(snapshot.history)
            except OSError as cause:  # the next epoch writes them whole
                _say(f"the metrics could not be stored ({short_reason(cause)}); training goes on")

    def _store_beside(self, snapshot: Snapshot) -> None:
        self._began = time.monotonic()
        self._storing = self._thread.submit(self._put, snapshot)

    def _store_again(self, seconds: float = float("inf")) -> None:
        if self._unstored:
            self._store_beside(self._unstored)
            self._wait(seconds)

    def _check(self) -> None:
        if len(self._lost) > self._config.max_failed_checkpoints:
            raise StorageError(f"{len(self._lost)} checkpoints in a row could not be stored ({self._lost[-1]})")

    def _finish(self) -> None:
        """Nothing may be missing of a run that has ended."""
        self._wait()
        self._store_again()
        if self._unstored:
            raise StorageError(f"the last checkpoint could not be stored ({self._lost[-1]})")

    def _wait(self, seconds: float = float("inf")) -> None:
        """Wait for the checkpoint on its way, with signs of life for no longer than a stall takes: disks hang, too."""
        deadline = time.monotonic() + seconds
        while self._storing and self.storing and time.monotonic() < deadline:
            wait_for([self._storing], timeout=min(LOOK_SECONDS, max(deadline - time.monotonic(), 0.0)))
            if time.monotonic() - self._began < self._config.stall_timeout:
                with suppress(Exception):
                    self._heartbeat()
        if self._storing and not self.storing:
            self._storing.result()  # raises what is a bug


def _say(line: str) -> None:
    print(f"training: {line}", flush=True)
