"""Helpers of all tests that start processes: wait for a condition, find free ports."""

import socket
import time
from collections.abc import Callable
from typing import Any

# Ends a hang; no test depends on it.
LIMIT_SECONDS = 480.0


def until(
    condition: Callable[[], Any],
    seconds: float = LIMIT_SECONDS,
    why: Callable[[], str] = str,
    between: float = 0.2,
) -> Any:
    """Poll a condition until its value is true, and return that value.

    A condition that takes long to evaluate, such as one that starts processes, is polled less often: it must not keep
    a core from what it waits for.

    Args:
        condition: What is polled.
        seconds: The limit.
        why: Returns what the error adds, such as the end of a log.
        between: Seconds between two polls; at least twice as many as a poll has taken.

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
        time.sleep(max(between, 2 * (time.monotonic() - begun_at)))


def free_ports(count: int) -> list[int]:
    """Return TCP ports of 127.0.0.1 that no process uses now, each a different one."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def free_port() -> int:
    """Return one of them."""
    [port] = free_ports(1)
    return port
