"""Run `ray start` as this process's child, and end as the one who stops the container expects."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from raynode import ports
from raynode.errors import NodeError, StartError

STOPS = (signal.SIGTERM, signal.SIGINT)
# What `ray start --block` ends with after these: 1 once it has gone, the signal before it knows how to.
STOPPED = (0, 1, -signal.SIGTERM, -signal.SIGINT)
POLL_SECONDS = 0.2


def node(name: str, start: Callable[[], int]) -> NoReturn:
    """Call `start` and exit with its status; a NodeError is one line, and SIGTERM before Ray runs is no failure."""
    for each in STOPS:
        signal.signal(each, lambda *_: sys.exit(0))
    try:
        _check_token()
        sys.exit(start())
    except NodeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def ray_start(name: str, arguments: Sequence[str], before_stop: Callable[[], signal.Signals]) -> int:
    """Run `ray start --block` until it ends.

    Args:
        name: What the lines in the log begin with.
        arguments: Of `ray start`, beside the ports that all nodes have.
        before_stop: Called when the node is asked to stop; says which signal Ray gets. On SIGTERM Ray drains the node:
            it takes no more work, and what runs there has RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S to end. On SIGINT it
            ends at once.

    Returns:
        0 if it was asked to stop and did, else Ray's own exit status.
    """
    asked: list[int] = []
    for each in STOPS:
        signal.signal(each, lambda number, _: asked.append(number))
    command = ["ray", "start", *arguments, *ports.flags(ports.NODE), "--disable-usage-stats", "--block"]
    child = subprocess.Popen(command, env={**ports.METRICS, **os.environ})
    while child.poll() is None and not asked:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
    if not asked:
        return _status(child.wait())
    began = time.monotonic()
    print(f"{name}: asked to stop; draining", flush=True)
    child.send_signal(_chosen(name, before_stop))
    ended = child.wait()
    print(f"{name}: stopped after {time.monotonic() - began:.0f} s", flush=True)
    return 0 if ended in STOPPED else _status(ended)


def _chosen(name: str, before_stop: Callable[[], signal.Signals]) -> signal.Signals:
    """What `before_stop` says; a failure of its own must not keep Ray from draining."""
    try:
        return before_stop()
    except Exception as cause:
        print(f"{name}: {cause!r}; draining all the same", file=sys.stderr)
        return signal.SIGTERM


def _status(ended: int) -> int:
    """A shell's way to tell a signal: 137 for SIGKILL."""
    return ended if ended >= 0 else 128 - ended


def _check_token() -> None:
    """Raise StartError without one; the message never holds it."""
    if os.environ.get("RAY_AUTH_MODE") != "token" or not os.environ.get("RAY_AUTH_TOKEN"):
        raise StartError("RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be set; without a token a cluster is open to all")
    if not re.fullmatch(r"[!-~]+", os.environ["RAY_AUTH_TOKEN"]):
        raise StartError("RAY_AUTH_TOKEN must be printable ASCII without spaces; look for a line break at its end")
