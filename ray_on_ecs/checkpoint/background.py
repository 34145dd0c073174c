"""Background save: a copy of the state in host memory, which a thread of each rank stores while training continues.

All ranks take the copy between two steps. The planners of torch.distributed.checkpoint divide the work: every rank
copies and writes its shards, and some of the replicated tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.dcp import StagingPlanner, Writer
from ray_on_ecs.checkpoint.index import CheckpointIndex, FileRecord, Manifest
from ray_on_ecs.checkpoint.state import TrainingState
from ray_on_ecs.errors import one_line
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage

# For a write in progress to notice that it has been given up, as it does at its next chunk of 16 MiB.
GIVE_UP_SECONDS = 5.0

# A rank's stored files, and the position of each tensor in them.
Part = tuple[dict[str, FileRecord], list[WriteResult]]


class DivergedError(ArithmeticError):
    """A weight is NaN or infinite, and is not saved. All ranks raise it at the same step."""


@dataclass(frozen=True)
class Copy:
    """Part of a checkpoint in a rank's host memory."""

    name: str  # the checkpoint's folder
    plan: SavePlan  # the items that this rank writes
    planner: StagingPlanner  # has the copies of the items
    metadata: Metadata | None  # of all ranks' items, on rank 0
    manifest: Manifest  # without the files


def take_copy(state: TrainingState, manifest: Manifest, ranks: Collectives, index: CheckpointIndex | None) -> Copy:
    """Copy the state; all ranks call it, rank 0 with the index; DivergedError if a weight is not finite."""
    if state.left_out:  # of a sharded parameter, the part of one rank may have changed, and that of another not
        state.include(key for keys in ranks.broadcast(ranks.gather(state.touched())) for key in keys)
    manifest["left_out"] = state.left_out
    planner = StagingPlanner()
    planner.set_up_planner(state.collect(), is_coordinator=ranks.rank == 0)
    gathered = ranks.gather((planner.create_local_plan(), state.is_finite()))
    metadata = None
    messages: list[Any] = []  # for each rank: its plan and the folder, or the first rank that has diverged
    if index is not None:
        diverged = [rank for rank, (_, is_finite) in enumerate(gathered) if not is_finite]
        if diverged:
            messages = [diverged[0]] * len(gathered)
        else:
            global_plan, metadata = planner.create_global_plan([plan for plan, _ in gathered])
            name = index.new_name(manifest["step"])
            # prepare_global_plan names the files.
            messages = [(name, plan) for plan in FileSystemWriter("").prepare_global_plan(global_plan)]
    message = ranks.scatter(messages)
    if isinstance(message, int):
        step = manifest["step"]
        raise DivergedError(f"weights of rank {message} are not finite after step {step}; they are not saved")
    name, plan = message
    return Copy(name, planner.finish_plan(plan), planner, metadata, manifest)


class BackgroundSave:
    """Storage of one copy after another. The threads don't use collectives: see `Collectives`.

    Each rank's thread writes its part and sends a record of it to rank 0's thread, which commits the checkpoint and
    sends the outcome to the others. All ranks must start the same copies in the same order.
    """

    def __init__(
        self, ranks: Collectives, storage: RunStorage, index: CheckpointIndex | None, say: Callable[[str], None]
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._index = index
        self._say = say
        self._thread: threading.Thread | None = None
        self._number = 0
        self._is_given_up = threading.Event()
        self.error: str | None = None  # reason of the last copy that could not be stored

    @property
    def is_busy(self) -> bool:
        """True while a copy is being stored."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, copy: Copy) -> None:
        """Store a copy; the one before must have ended."""
        self._number += 1
        # A daemon: Python waits for other threads at its exit, and this one may wait for a rank that has died.
        self._thread = threading.Thread(target=self._run, args=(copy, self._number), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, deadline: float | None = None) -> bool:
        """Wait for the copy in progress, at most until a deadline (Unix time); returns True if it has ended."""
        timeout = None if deadline is None else max(deadline - time.time(), 0.0)
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy

    def give_up(self) -> None:
        """End the copy in progress: Python can't exit while PyTorch writes in a thread."""
        self._is_given_up.set()
        self._ranks.stop_waiting()
        self.wait(time.time() + GIVE_UP_SECONDS)

    def _run(self, copy: Copy, number: int) -> None:
        try:
            self.error = self._store(copy, number)
        except Exception as cause:  # rank 0 or this process is ending; the exception would be lost with the thread
            self.error = _reason(cause)
        if self.error and not self._is_given_up.is_set():
            self._say(f"{copy.name} could not be stored ({self.error}); training continues")

    def _store(self, copy: Copy, number: int) -> str | None:
        """Store a copy; returns the reason of a failure, or None."""
        part = self._write(copy)
        if self._index is None:
            self._ranks.send(0, f"{number}/part/{self._ranks.rank}", part)
            return self._ranks.receive(f"{number}/outcome")
        others = range(1, self._ranks.world_size)
        parts: list[Part] = []
        outcome: str | None = None
        for each in [part, *(self._ranks.receive(f"{number}/part/{rank}") for rank in others)]:
            if isinstance(each, str):
                outcome = outcome or each
            else:
                parts.append(each)
        outcome = outcome or self._commit(copy, parts, self._index)
        for rank in others:
            self._ranks.send(rank, f"{number}/outcome", outcome)
        if outcome and not self._is_given_up.is_set():
            self._index.clean()  # all ranks have ended their writes
        return outcome

    def _write(self, copy: Copy) -> Part | str:
        """Write this rank's part; returns the reason if that fails, for example because the disk is full."""
        try:
            if self._index is not None:
                self._index.clean()
                self._index.discard(copy.name)
            writer = Writer(self._storage, copy.name, self._beat)
            results = writer.write_data(copy.plan, copy.planner).value()
        except Exception as cause:  # returned, as all ranks have to discard the checkpoint
            return _reason(cause)
        return writer.files, results

    def _beat(self) -> None:
        """Send a heartbeat, or end a write that has been given up."""
        if self._is_given_up.is_set():
            raise OSError("the process ends")
        sdk.alive()

    def _commit(self, copy: Copy, parts: list[Part], index: CheckpointIndex) -> str | None:
        """Commit the checkpoint of all ranks' parts; returns the reason if that fails."""
        assert copy.metadata is not None
        try:
            writer = Writer(self._storage, copy.name)
            writer.finish(copy.metadata, [results for _, results in parts])
            for files, _ in parts:
                writer.files |= files
            index.commit(copy.name, {**copy.manifest, "files": writer.files})
        except Exception as cause:
            return _reason(cause)
        return None


def _reason(cause: Exception) -> str:
    """Return the reason of a failed write. PyTorch raises RuntimeError for errors of the stream."""
    kind = "" if isinstance(cause, OSError | RuntimeError) else f"{type(cause).__name__}: "
    return one_line(f"{kind}{short_reason(cause)}")
