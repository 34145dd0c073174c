"""Wait for a condition, in tests that start processes."""

import time
from collections.abc import Callable
from typing import Any

# Ends a hang; no test depends on it.
LIMIT_SECONDS = 480.0
MIN_PAUSE, MAX_PAUSE = 0.2, 2.0


def until(
    condition: Callable[[], Any],
    seconds: float = LIMIT_SECONDS,
    why: Callable[[], str] = str,
    between: float | None = None,
) -> Any:
    """Poll a condition until its value is true, and return that value.

    Args:
        condition: The condition.
        seconds: The limit.
        why: Returns an addition to the error, such as the end of a log.
        between: Seconds between two polls. By default 0.2, or more after a slow poll, such as one that starts
            processes, which would take a core from the awaited process.

    Raises:
        TimeoutError: The limit has passed.
    """
    deadline = time.monotonic() + seconds
    while True:
        begun_at = time.monotonic()
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {seconds:.0f} s {why()}".rstrip())
        took = time.monotonic() - begun_at
        time.sleep(min(max(MIN_PAUSE, 2 * took), MAX_PAUSE) if between is None else between)
