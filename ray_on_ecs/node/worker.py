"""`ray-worker`: a node that joins the cluster whose head is RAY_HEAD_HOST.

Arguments, such as --num-gpus=1, go to `ray start`. Before the node joins, it checks that its GPUs work, and that the
head answers at that name, accepts the token and runs the same version of Ray. A failed check costs one line. An
instance whose GPUs fail is replaced.
"""

import argparse
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version

from ray_on_ecs.contract import HEAD_HOST_VARIABLE
from ray_on_ecs.errors import GpuError, HeadError, StartError, failure_of
from ray_on_ecs.node import api, demand, efa, gpus, labels, notice, ports, process, protection, replacement
from ray_on_ecs.node.draining import Draining

logger = logging.getLogger(__name__)

DEFAULT_WAIT_SECONDS = 300.0  # a new head pulls its image
# Time that a joined worker waits for a new head, which may have to pull its image first.
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_SECONDS = "600"
RETRY_SECONDS = 5.0  # each prints a line
# Both GPU checks and the replacement fit into the health check's start period, 300 s.
RECHECK_SECONDS, SECOND_CHECK_SECONDS = 30.0, 60.0


def main() -> None:
    """Run `ray-worker`."""
    process.run_node("ray-worker", start)


def start() -> int:
    """Join the cluster and run until the node ends; return its exit status, or raise a NodeError before Ray starts."""
    host = os.environ.get(HEAD_HOST_VARIABLE)
    if not host:
        raise StartError(f"{HEAD_HOST_VARIABLE} is not set; give it the name of the Ray head")
    notice.wait_for_end()
    if disks := labels.local_disks():
        logger.info(disks)
    check_gpus(expected_gpus(sys.argv[1:]))
    efa.report()
    wait_for_head(host, wait_seconds())
    try:
        own = ports.source_address_for(host)
    except OSError as cause:
        raise HeadError(f"{host} has no address any longer, or is not routable ({cause})") from cause
    os.environ.setdefault(RECONNECT, RECONNECT_SECONDS)
    # A name instead of an address: the next head, which Ray reconnects to, may have another address.
    head = f"{host}:{ports.GCS}"
    release = protection.start(partial(demand.node_in_use, head, own))
    is_stopping = notice.start(release, Draining(head, own).drain, replacement.request)
    arguments = [f"--address={head}", f"--node-ip-address={own}", *labels.flags(), *sys.argv[1:]]
    return process.ray_start(arguments, before_stop=partial(before_stop, host, release, is_stopping))


def check_gpus(expected: int) -> None:
    """Check the GPUs, twice if the first check fails; then request a replacement of this instance.

    On an instance that has just started they may need a moment, such as GPUs that a fabric manager connects.
    """
    try:
        return gpus.check(expected)
    except GpuError as fault:
        logger.warning(f"{fault}; checking again in {RECHECK_SECONDS:.0f} s")
    time.sleep(RECHECK_SECONDS)
    try:
        gpus.check(expected, SECOND_CHECK_SECONDS)
    except GpuError:
        replacement.request()
        raise


def wait_seconds() -> float:
    """Return the time to wait for the head: RAY_HEAD_WAIT_S, or five minutes; StartError if it is not a number."""
    text = os.environ.get("RAY_HEAD_WAIT_S") or str(DEFAULT_WAIT_SECONDS)
    with suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds < math.inf:
            return seconds
    raise StartError(f"RAY_HEAD_WAIT_S: {text!r} is not a number of seconds")


def expected_gpus(arguments: list[str]) -> int:
    """Return the N of --num-gpus=N or --num-gpus N, or 0."""
    parser = argparse.ArgumentParser(prog="ray-worker", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-gpus", type=int, default=0)
    return parser.parse_known_args(arguments)[0].num_gpus


def before_stop(host: str, release: Callable[[], None], is_stopping: Callable[[], None]) -> signal.Signals:
    """Release the task, whose protection could outlast this process; return the signal for Ray."""
    is_stopping()
    if failure := failure_of(release):
        logger.warning(f"the release of this task's protection has failed ({failure})")
    return stop_signal(host)


def stop_signal(host: str) -> signal.Signals:
    """Return SIGTERM to drain the node, or SIGINT if the head is gone: without it Ray can't move work elsewhere."""
    for _ in range(2):
        try:
            api.check_gcs(f"{host}:{ports.GCS}")
            return signal.SIGTERM
        except OSError:
            time.sleep(1)
    logger.info(f"{host} does not answer; stopping at once")
    return signal.SIGINT


def wait_for_head(host: str, seconds: float) -> None:
    """Return once the head accepts this node; HeadError if it has not within `seconds`, StartError if it never will."""
    started_at = time.monotonic()
    while True:
        reason = join_blocker(host)
        if reason is None:
            return
        waited = time.monotonic() - started_at
        if waited >= seconds:
            raise HeadError(f"{reason}, after {seconds:.0f} s; is the head running, and {HEAD_HOST_VARIABLE} its name?")
        logger.info(f"waiting for the head: {reason} ({waited:.0f} of {seconds:.0f} s)")
        time.sleep(min(RETRY_SECONDS, seconds - waited))


def join_blocker(host: str) -> str | None:
    """Return the reason why this node can't join the head yet, or None if it can; StartError if it never can."""
    try:
        socket.getaddrinfo(host, ports.DASHBOARD)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return f"{host} has no address"
    try:
        answer = api.ask(f"http://{host}:{ports.DASHBOARD}/api/version")
    except api.TokenError:
        raise StartError(f"the head {host} refuses the token; give both nodes the same RAY_AUTH_TOKEN") from None
    except api.AnswerError as cause:
        return f"{host}:{ports.DASHBOARD} does not answer ({cause.reason})"
    if not isinstance(answer, dict) or "ray_version" not in answer:
        return f"{host}:{ports.DASHBOARD} does not answer as a Ray head does"
    head_version, own_version = answer["ray_version"], version("ray")
    if head_version != own_version:
        raise StartError(
            f"the head {host} runs Ray {head_version} and this node Ray {own_version}; start both from one image"
        )
    return None
