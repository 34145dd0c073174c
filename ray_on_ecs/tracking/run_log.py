"""Log of a command in the run's folder, where its standard output is a file, as in a Ray job."""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
from datetime import datetime

from ray_on_ecs.errors import one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.shown_log import Filter

logger = logging.getLogger(__name__)

MAX_BYTES = 10 * 2**20
STDOUT = 1


class RunLog:
    """Stores the end of this process's output; does nothing if that goes to a terminal or a pipe."""

    def __init__(self, storage: RunStorage, started: datetime, descriptor: int = STDOUT) -> None:
        self._storage = storage
        self._name = f"{layout.LOGS}/{started:%Y%m%dT%H%M%SZ}.txt"
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._stored: tuple[int, int] | None = None

    def store(self) -> None:
        """Store the log if it has changed; the next call repeats a failed one."""
        try:
            with self._lock:
                sys.stdout.flush()
                status = os.fstat(self._descriptor)
                version = (status.st_size, status.st_mtime_ns)
                if stat.S_ISREG(status.st_mode) and version != self._stored:
                    self._storage.write(self._name, self._read_end(status.st_size).encode())
                    self._stored = version
        except (OSError, ValueError) as cause:
            logger.debug(f"the log could not be stored, and will be tried again ({one_line(cause)})")

    def _read_end(self, size: int) -> str:
        """Return the shown lines of the last `MAX_BYTES`, from the start of a line."""
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:  # the descriptor is open for writing only
            file.seek(max(size - MAX_BYTES, 0))
            if size > MAX_BYTES:
                file.readline()
            lines = file.read().decode(errors="replace").split("\n")
            return "\n".join(Filter().shown(lines))
