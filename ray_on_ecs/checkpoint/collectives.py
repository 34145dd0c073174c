"""Messages and decisions of all ranks about checkpoints, separate from the collectives of the training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint import plain_pickle

# Between two looks into the store of the ranks, by threads that training does not wait for.
STORE_SECONDS = 0.05
# Between two polls of all ranks: a collective after each step would slow down fast steps.
POLL_SECONDS = 1.0

T = TypeVar("T")


class Collectives:
    """Collectives and messages for small plain values (plain_pickle.py); a single rank does not send any.

    Every rank must create one. The store that connects the ranks has no password, so a message is never trusted. The
    main thread uses a separate Gloo process group, by the group's own methods: they also work after the script's
    `destroy_process_group()`, which may come before `close`. Other threads use `send` and `receive` instead: a thread
    in a collective would make its process hang or abort when the process exits.
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
        if not self._group:
            return value
        packed = plain_pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor(len(packed), device="cpu")
        self._group.broadcast(size, 0).wait()
        message = _tensor(packed, int(size))
        self._group.broadcast(message, 0).wait()
        return value if self.rank == 0 else _value(message)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, and nothing on the others."""
        if not self._group:
            return [value]
        packed = plain_pickle.dumps(value)
        sizes = [torch.tensor(0, device="cpu") for _ in range(self.world_size)]
        self._group.allgather(sizes, torch.tensor(len(packed), device="cpu")).wait()
        largest = int(max(sizes))
        messages = [_tensor(b"", largest) for _ in sizes] if self.rank == 0 else []
        self._group.gather(messages, _tensor(packed, largest), 0).wait()
        return [_value(message[: int(size)]) for message, size in zip(messages, sizes, strict=False)]

    def first(self, value: T | None) -> T | None:
        """Return the value of the first rank whose value is not None, on every rank."""
        values = [value for value in self.gather(value) if value is not None]
        return self.broadcast(values[0] if values else None)

    def scatter(self, values: list[T]) -> T:
        """Return this rank's element of rank 0's list."""
        if not self._group:
            return values[0]
        packed = [plain_pickle.dumps(value) for value in values] if self.rank == 0 else []
        sizes = torch.tensor([len(each) for each in packed] or [0] * self.world_size, device="cpu")
        self._group.broadcast(sizes, 0).wait()
        largest = int(sizes.max())
        message = _tensor(b"", largest)
        self._group.scatter(message, [_tensor(each, largest) for each in packed], 0).wait()
        return _value(message[: int(sizes[self.rank])])

    def send(self, rank: int, key: str, value: Any) -> None:
        """Put a value into the store, for a rank to `receive`; thread-safe. OSError if rank 0's process is gone."""
        try:
            self._store.set(f"{key}/{rank}", cast(Any, plain_pickle.dumps(value)))  # annotated as str, but takes bytes
        except RuntimeError as cause:
            raise OSError("rank 0 can't be reached") from cause

    def receive(self, key: str) -> Any:
        """Wait for a value that was sent to this rank, and remove it from the store; thread-safe.

        OSError if rank 0's process is gone, this rank is ending, or the value was not sent by a Checkpointer.
        """
        own_key = f"{key}/{self.rank}"
        try:
            # Not `wait`, which `stop_waiting` could not interrupt.
            while not self._store.check([own_key]):
                if self._closed.wait(STORE_SECONDS):
                    raise OSError("the run ended before all ranks had stored their part")
            packed = self._store.get(own_key)
            self._store.delete_key(own_key)
        except RuntimeError as cause:
            raise OSError("rank 0 can't be reached") from cause
        try:
            return plain_pickle.loads(packed)
        except ValueError as cause:
            raise OSError(f"a message was not sent by a Checkpointer: {cause}") from cause

    def stop_waiting(self) -> None:
        """Make `receive` fail in threads that still wait."""
        self._closed.set()

    def close(self) -> None:
        """Stop waiting threads, and destroy the process group."""
        self.stop_waiting()
        if self._group:
            with suppress(ValueError):  # the script has destroyed all groups
                dist.destroy_process_group(self._group)


class Pace:
    """Step counter for polls of all ranks about POLL_SECONDS apart; the count is the same on all ranks."""

    def __init__(self) -> None:
        self._steps = 1  # until the next poll
        self._since = 0
        self._polled_at = time.monotonic()

    def is_due(self) -> bool:
        """Count a step; returns True if the ranks poll after it."""
        self._steps -= 1
        self._since += 1
        return self._steps <= 0

    def poll(self, ranks: Collectives, decide: Callable[[float, set[str]], T]) -> T:
        """Return rank 0's decision on all ranks, which must call it after the same step.

        It depends on the seconds until the first node is reclaimed, which are infinite without a notice, and on the
        events for extra saves.
        """
        told = ranks.gather((sdk.seconds_left(), sdk.extra_save()))
        answer: Any = None
        if told:  # on rank 0
            now = time.monotonic()
            steps = round(self._since * POLL_SECONDS / max(now - self._polled_at, 1e-6))
            # At most twice as many steps as the last time: the next ones may be slower.
            seconds_left, events = min(each[0] for each in told), {each[1] for each in told} - {""}
            answer = (max(1, min(2 * self._since, steps)), decide(seconds_left, events))
            self._polled_at, self._since = now, 0
        self._steps, decision = ranks.broadcast(answer)
        return decision


class Reclaim:
    """Poll for notices of reclaimed nodes. The script saves itself, and gets SIGTERM only in the last seconds."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._ranks: Collectives | None = None
        sdk.register_checkpointer()

    def is_near(self) -> bool:
        """Return True if a node is being reclaimed; all ranks must call it after each step, and agree."""
        if not self._pace.is_due():
            return False
        if self._ranks is None:  # trainers create the callback before the process group
            self._ranks = Collectives()
        return self._pace.poll(self._ranks, lambda seconds, events: math.isfinite(seconds))


def _tensor(data: bytes, size: int) -> Tensor:
    """Return bytes as a tensor of this size; the rest of it is zero."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _value(message: Tensor) -> Any:
    return plain_pickle.loads(message.numpy().tobytes())
