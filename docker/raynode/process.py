"""Run `ray start` as this process's child, and end as the one who stops the container expects."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from raynode import ports
from raynode.errors import StartError

STOPS = (signal.SIGTERM, signal.SIGINT)
# What `ray start --block` ends with after SIGTERM: 1 once it has drained, the signal before it knows how to.
STOPPED = (0, 1, -signal.SIGTERM, -signal.SIGINT)


def node(name: str, start: Callable[[], int]) -> NoReturn:
    """Call `start` and exit with its status; a StartError is one line, and SIGTERM before Ray runs is no failure."""
    for each in STOPS:
        signal.signal(each, lambda *_: sys.exit(0))
    try:
        if os.environ.get("RAY_AUTH_MODE") != "token" or not os.environ.get("RAY_AUTH_TOKEN"):
            raise StartError(
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be set; without a token a cluster is open to all"
            )
        sys.exit(start())
    except StartError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def ray_start(name: str, arguments: Sequence[str], before_stop: Callable[[], None] = lambda: None) -> int:
    """Run `ray start --block` until it ends.

    SIGTERM is handed on to it after `before_stop`. Ray then drains the node: it takes no more work, and what runs there
    has RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S to end.

    Returns:
        0 if it was asked to stop and did, else Ray's own exit status.
    """
    command = ["ray", "start", *arguments, *ports.flags(ports.NODE), "--disable-usage-stats", "--block"]
    child = subprocess.Popen(command, env={**ports.METRICS, **os.environ})
    asked: list[float] = []

    def stop(number: int, _: object) -> None:
        if not asked:
            asked.append(time.monotonic())
            print(f"{name}: asked to stop; draining", flush=True)
            before_stop()
            child.send_signal(signal.SIGTERM)

    for each in STOPS:
        signal.signal(each, stop)
    status = child.wait()
    if asked and status in STOPPED:
        print(f"{name}: stopped after {time.monotonic() - asked[0]:.0f} s", flush=True)
        return 0
    return status if status >= 0 else 128 - status
