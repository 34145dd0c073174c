"""Periodic calls on a daemon thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def run_every(seconds: float, call: Callable[[], None], name: str, *, at_once: bool = False) -> Generator[None]:
    """Call a function at an interval until the block ends, on a daemon thread with a name.

    With `at_once` the first call is at the block's start. The block's end waits for a call in progress, unless the
    user interrupts the block.
    """
    stop = threading.Event()

    def loop() -> None:
        if at_once:
            call()
        while not stop.wait(seconds):
            call()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        if not isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
            thread.join()
