"""A hung process ends itself: after too long without a heartbeat it writes the stacks of its threads and exits.

A Python thread does so as long as the interpreter works. If it hangs, as in a C call that keeps the interpreter's lock,
faulthandler's own thread, which needs no interpreter, takes over a little later. A process that the system has stopped
(SIGSTOP) can do neither: `monitoring.post_mortem` kills it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

# Long enough for every rank to write its stacks: as soon as one has exited, the others are killed.
EXIT_DELAY_SECONDS = 5.0
# When faulthandler takes over; before the other ranks exit.
TAKEOVER_SECONDS = 2.0
REARM_SECONDS = 1.0


class Watchdog:
    """Watches this process; a context.

    Args:
        timeout: Seconds without a heartbeat that count as a hang.
        file: Receives the stacks, after a line of JSON with `about`. It is deleted when the context ends well, and
            stays if it fails or the process dies.
        about: What a reader of the file needs to know of this process.
    """

    def __init__(self, timeout: float, file: Path, about: Mapping[str, Any]) -> None:
        self._timeout = timeout
        self._limit = timeout
        self._path = file
        self._about = about
        self._beat = 0.0
        self._armed_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self._file.write(json.dumps(self._about) + "\n")
        self._file.flush()
        self.heartbeat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        self._file.close()
        if kind is None:
            self._path.unlink(missing_ok=True)

    def heartbeat(self) -> None:
        """Report progress."""
        self._beat = time.monotonic()
        if self._beat - self._armed_at >= min(REARM_SECONDS, self._limit / 4):
            self._arm()

    @contextmanager
    def patience(self, factor: float) -> Generator[None]:
        """Allow `factor` times the timeout, for work that gives no heartbeats."""
        self._limit = factor * self._timeout
        self._arm()
        self.heartbeat()
        try:
            yield
        finally:
            self._limit = self._timeout
            self._arm()
            self.heartbeat()

    def _arm(self) -> None:
        self._armed_at = time.monotonic()
        faulthandler.dump_traceback_later(self._limit + TAKEOVER_SECONDS, exit=True, file=self._file)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout / 4)):
            if time.monotonic() - self._beat > self._limit:
                self._exit_unless_progress()

    def _exit_unless_progress(self) -> None:
        beat = self._beat
        faulthandler.cancel_dump_traceback_later()
        self._file.write(f"no progress for {self._limit:g} s\n\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        with suppress(Exception):  # whatever is wrong with NCCL must not keep the process alive
            self._file.write(_flight_recorder())
            self._file.flush()
        if not self._stop.wait(EXIT_DELAY_SECONDS) and self._beat == beat:
            os._exit(1)


def _flight_recorder() -> str:
    """Return NCCL's flight recorder: the last collectives of this rank and whether they finished, as JSON.

    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    if "torch.distributed" not in sys.modules:
        return ""
    import torch.distributed as dist

    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return ""
    from torch._C import _distributed_c10d as c10d

    return f"\nNCCL flight recorder:\n{c10d._dump_fr_trace_json().decode()}\n"  # ty: ignore[missing-attribute]
