"""Messages between the ranks about checkpoints, separate from the collectives of the training."""

from __future__ import annotations

import pickle
import threading
from typing import Any, TypeVar, cast

import torch.distributed as dist

POLL_SECONDS = 0.05

T = TypeVar("T")


class Collectives:
    """Collectives and messages for small Python objects; a single rank does not send any. Every rank must create one.

    The main thread uses a separate Gloo process group. Other threads use `send` and `receive` instead: a thread in a
    collective would make its process hang or abort when the process exits.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store = dist.HashStore()
        self._closed = threading.Event()
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world_size = dist.get_world_size()
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"checkpoints/{self._group.group_name}", store)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        values = [value]
        if self._group:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, and nothing on the others."""
        if not self._group:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._group)
        return values if self.rank == 0 else []

    def first(self, value: T | None) -> T | None:
        """Return the value of the first rank whose value is not None, on every rank."""
        values = [value for value in self.gather(value) if value is not None]
        return self.broadcast(values[0] if values else None)

    def scatter(self, values: list[T]) -> T:
        """Return this rank's element of rank 0's list."""
        if not self._group:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=0, group=self._group)
        return received[0]

    def send(self, rank: int, key: str, value: Any) -> None:
        """Put a value into the store, for a rank to `receive`; thread-safe.

        Raises:
            OSError: Rank 0's process is gone.
        """
        try:
            self._store.set(f"{key}/{rank}", cast(Any, pickle.dumps(value)))  # annotated as str, but takes bytes
        except RuntimeError as cause:
            raise OSError("rank 0 can't be reached") from cause

    def receive(self, key: str) -> Any:
        """Wait for a value that was sent to this rank, and remove it from the store; thread-safe.

        Raises:
            OSError: Rank 0's process is gone, or this rank is ending.
        """
        own_key = f"{key}/{self.rank}"
        try:
            # Not `wait`, which `stop_waiting` could not interrupt.
            while not self._store.check([own_key]):
                if self._closed.wait(POLL_SECONDS):
                    raise OSError("the run ended before all ranks had stored their part")
            value = pickle.loads(self._store.get(own_key))
            self._store.delete_key(own_key)
        except RuntimeError as cause:
            raise OSError("rank 0 can't be reached") from cause
        return value

    def stop_waiting(self) -> None:
        """Make `receive` fail in threads that still wait."""
        self._closed.set()

    def close(self) -> None:
        """Stop waiting threads, and destroy the process group."""
        self.stop_waiting()
        if self._group:
            dist.destroy_process_group(self._group)
