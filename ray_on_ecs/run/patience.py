"""Questions whose answer may take long, such as those to a storage: something else goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# S3's own attempts may take as long.
ASK_SECONDS = 90.0
PAUSE_SECONDS = 0.1


def ask(call: Callable[[], T], meanwhile: Callable[[], object] = lambda: None, seconds: float = ASK_SECONDS) -> T:
    """Return what a call on another thread returns; meanwhile call something else again and again.

    Raises:
        TimeoutError: The call has not returned in time, and continues.
    """
    answer: Future[T] = Future()

    def take() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=take, name="question", daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        try:
            return answer.result(PAUSE_SECONDS)
        except TimeoutError:
            if answer.done():  # just now, or the error is the call's own
                return answer.result()
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        meanwhile()
