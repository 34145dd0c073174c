"""Helpers of all tests that start processes: wait for a condition, find free ports."""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Ends a hang; no test depends on it.
LIMIT_SECONDS = 480.0
MIN_PAUSE, MAX_PAUSE = 0.2, 2.0
PORTS = range(20_000, 32_000)


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


def listens(port: int) -> bool:
    """Whether a server listens on a TCP port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Return TCP ports of 127.0.0.1 that no process uses now, each a different one.

    They lie outside the ranges from which Linux and Ray choose ports, so that nothing takes one before its use.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = secrets.choice(PORTS)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            ports.add(port)
    return list(ports)
