"""The log of a command, stored in the run's folder where its output is a file, as that of a Ray job is."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime

from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.shown_log import Filter
from ray_on_ecs.tracking.storage import RunStorage

STORE_SECONDS = 60.0
MAX_BYTES = 10 * 2**20
STDOUT = 1


class RunLog:
    """Stores the end of what this process prints; nothing where that goes to a terminal or a pipe.

    Args:
        storage: The run's folder.
        started: When the command began; the file is named after it.
        descriptor: Where it prints.
    """

    def __init__(self, storage: RunStorage, started: datetime, descriptor: int = STDOUT) -> None:
        self._storage = storage
        self._name = f"{layout.LOGS}/{started:%Y%m%dT%H%M%SZ}.txt"
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._stored: tuple[int, int] | None = None

    @contextmanager
    def storing(self) -> Generator[None]:
        """Store it every minute until the block ends."""
        with run_every(STORE_SECONDS, self.store, "run log"):
            yield

    def store(self) -> None:
        """Store what has been printed, if there is more than the last time. A failure is left to the next call."""
        with suppress(OSError, ValueError), self._lock:
            sys.stdout.flush()
            found = os.fstat(self._descriptor)
            version = (found.st_size, found.st_mtime_ns)
            if not stat.S_ISREG(found.st_mode) or version == self._stored:
                return
            self._storage.write(self._name, self._read_end(found.st_size).encode())
            self._stored = version

    def _read_end(self, size: int) -> str:
        """Return what is shown of the last `MAX_BYTES`, from the start of a line."""
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:  # the descriptor itself may not be read
            file.seek(max(size - MAX_BYTES, 0))
            if size > MAX_BYTES:
                file.readline()
            lines = file.read().decode(errors="replace").split("\n")
            return "\n".join(Filter().shown(lines))
