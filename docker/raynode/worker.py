"""`ray-worker`: a node that joins the cluster whose head is RAY_HEAD_HOST.

Arguments, such as --num-gpus=1, go to `ray start`. Before it joins it sees that its GPUs work, and that a head answers
under that name, takes this node's token and runs the same Ray; what doesn't hold is said in one line.
"""

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from urllib.error import HTTPError

from raynode import address, api, gpus, ports, process
from raynode.errors import HeadError, StartError

DEFAULT_WAIT_SECONDS = 300.0
# How long a worker that has joined waits for a head that comes back, also where its image has to be pulled first.
RECONNECT, RECONNECT_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", "600"
SECONDS_BETWEEN = 5.0


def main() -> None:
    """Run `ray-worker`."""
    process.node("ray-worker", start)


def start() -> int:
    """Join the cluster and stay until the node ends; its exit status."""
    host = os.environ.get("RAY_HEAD_HOST")
    if not host:
        raise StartError("RAY_HEAD_HOST is not set; give it the name of the Ray head")
    gpus.check(promised_gpus(sys.argv[1:]))
    wait_for_head(host, wait_seconds())
    try:
        own = address.towards(host)
    except OSError as cause:
        raise HeadError(f"{host} has no address any more, or no route leads there ({cause})") from cause
    os.environ.setdefault(RECONNECT, RECONNECT_SECONDS)
    # By name, not by address: when the head comes back under another one, Ray finds it there.
    arguments = [f"--address={host}:{ports.GCS}", f"--node-ip-address={own}", *sys.argv[1:]]
    return process.ray_start("ray-worker", arguments, before_stop=partial(stop_signal, host))


def wait_seconds() -> float:
    """How long to wait for the head: RAY_HEAD_WAIT_S, or five minutes."""
    given = os.environ.get("RAY_HEAD_WAIT_S") or str(DEFAULT_WAIT_SECONDS)
    try:
        seconds = float(given)
        if 0 <= seconds < float("inf"):
            return seconds
    except ValueError:
        pass
    raise StartError(f"RAY_HEAD_WAIT_S: {given!r} is not a number of seconds")


def promised_gpus(arguments: list[str]) -> int:
    """N of the arguments --num-gpus=N or --num-gpus N, 0 without them."""
    parser = argparse.ArgumentParser(prog="ray-worker", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-gpus", type=int, default=0)
    return parser.parse_known_args(arguments)[0].num_gpus


def stop_signal(host: str) -> signal.Signals:
    """SIGTERM, to drain; without a head, which alone could move the work, there is nothing to wait for."""
    for _ in range(2):
        try:
            with suppress(HTTPError):  # it answers, whatever it says
                api.get(f"http://{host}:{ports.DASHBOARD}/api/version")
            return signal.SIGTERM
        except OSError:
            time.sleep(1)
    print(f"ray-worker: {host} does not answer; stopping at once", flush=True)
    return signal.SIGINT


def wait_for_head(host: str, seconds: float) -> None:
    """Return as soon as the head would have this node.

    Raises:
        StartError: The head refuses this token, or runs another version of Ray.
        HeadError: No head has answered within `seconds`.
    """
    began = time.monotonic()
    while reason := why_not(host):
        waited = time.monotonic() - began
        if waited >= seconds:
            raise HeadError(f"{reason}, after {seconds:.0f} s; is the head running, and RAY_HEAD_HOST its name?")
        print(f"ray-worker: waiting for the head: {reason} ({waited:.0f} of {seconds:.0f} s)", flush=True)
        time.sleep(min(SECONDS_BETWEEN, seconds - waited))


def why_not(host: str) -> str | None:
    """Why the head can't be joined yet, or None if it can; StartError if it never will."""
    try:
        socket.getaddrinfo(host, ports.DASHBOARD)
    except (OSError, UnicodeError):  # the latter for what can't be a name
        return f"{host} has no address"
    try:
        answer = api.get(f"http://{host}:{ports.DASHBOARD}/api/version")
    except HTTPError as refusal:
        if refusal.code in (401, 403):
            raise StartError(f"the head {host} refuses the token; give both nodes the same RAY_AUTH_TOKEN") from None
        return f"{host}:{ports.DASHBOARD} answers with {refusal.code}"
    except OSError as cause:
        return f"{host}:{ports.DASHBOARD} does not answer ({getattr(cause, 'reason', cause)})"
    if not isinstance(answer, dict) or "ray_version" not in answer:
        return f"{host}:{ports.DASHBOARD} does not answer as a Ray head does"
    _refuse_another_version(host, answer["ray_version"])
    return None


def _refuse_another_version(host: str, theirs: str) -> None:
    ours = version("ray")
    if theirs != ours:
        raise StartError(f"the head {host} runs Ray {theirs} and this node Ray {ours}; start both from one image")
