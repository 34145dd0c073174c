"""`ray start` as a child process, with the exit status that the container engine expects."""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from ray_on_ecs import logs
from ray_on_ecs.errors import NodeError, StartError
from ray_on_ecs.node import ports

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Return codes of `ray start --block` after a stop signal: 1 if it has shut down, the signal if it was still starting.
CLEAN_EXITS = (0, 1, -signal.SIGTERM, -signal.SIGINT)
POLL_SECONDS = 0.2  # a stop signal waits for it


def run_node(name: str, start: Callable[[], int]) -> NoReturn:
    """Call `start` and exit with its status.

    A NodeError becomes one line and its exit status; a stop signal before Ray runs becomes exit status 0.
    """
    logs.set_up(name, errors_from=logging.WARNING)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        if os.environ.get("RAY_AUTH_MODE") != "token" or not os.environ.get("RAY_AUTH_TOKEN"):
            raise StartError(
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be set; without a token anyone can use the cluster"
            )
        if not re.fullmatch(r"[!-~]+", os.environ["RAY_AUTH_TOKEN"]):  # the line never contains the token
            raise StartError("RAY_AUTH_TOKEN must be printable ASCII without spaces; look for a line break at its end")
        sys.exit(start())
    except NodeError as error:
        logger.error(error)
        sys.exit(error.exit_status)


def ray_start(
    arguments: Sequence[str], before_stop: Callable[[], signal.Signals], ray: Sequence[str] = ("ray",)
) -> int:
    """Run `ray start --block` until it ends; return 0 if it exited cleanly after a stop signal, else its exit status.

    On a stop signal `before_stop` returns the signal for Ray. On SIGTERM Ray drains the node: it does not accept new
    work, and running work has RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S seconds to end. On SIGINT Ray exits at once.
    """
    received: list[int] = []
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, lambda number, _: received.append(number))
    command = [*ray, "start", *arguments, *ports.flags(ports.NODE), "--disable-usage-stats", "--block"]
    child = subprocess.Popen(command, env={**ports.METRICS, **os.environ})
    logger.debug(f"process {child.pid}: {shlex.join(command)}")
    while child.poll() is None and not received:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
    if not received:
        return _exit_status(child.wait())
    stopped_at = time.monotonic()
    logger.info("asked to stop; draining")
    stop_signal = signal.SIGTERM
    try:
        stop_signal = before_stop()
    except Exception as cause:  # Ray must be drained in any case
        logger.warning(f"{cause!r}; draining nevertheless")
    child.send_signal(stop_signal)
    returncode = child.wait()
    logger.info(f"stopped after {time.monotonic() - stopped_at:.0f} s")
    return 0 if returncode in CLEAN_EXITS else _exit_status(returncode)


def _exit_status(returncode: int) -> int:
    """Return the exit status as a shell reports it: 137 for SIGKILL."""
    return returncode if returncode >= 0 else 128 - returncode
