"""Session Manager: a port of this machine that leads into the stack's VPC, as long as it is needed.

`aws ssm start-session` and its plugin do the work; whatever this starts ends with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

from ray_on_ecs.errors import HeadUnavailable, ResourceError, UsageError, one_line

OPEN_SECONDS = 60.0
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.05
AWS_CLI = "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
PLUGIN = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"


@contextmanager
def forwarded_port(
    region: str, instance_id: str, document: str, host: str, port: int, environment: Mapping[str, str]
) -> Generator[int]:
    """Forward a port of this machine to `host:port`, as the instance reaches it; yields the port here.

    Args:
        region: The region.
        instance_id: The instance.
        document: The Session document that forwards ports.
        host: The name or address that leads to the port from there.
        port: That port.
        environment: The variables of the AWS CLI, with its credentials.

    Raises:
        UsageError: The AWS CLI or its plugin is not installed, or there are no credentials.
        ResourceError: Session Manager does not reach the instance.
    """
    check_installed()
    local = _free_port()
    parameters = {"host": [host], "portNumber": [str(port)], "localPortNumber": [str(local)]}
    command = [
        *("aws", "ssm", "start-session", "--region", region, "--target", instance_id),
        *("--document-name", document, "--parameters", json.dumps(parameters)),
    ]
    with tempfile.TemporaryFile("w+") as said:
        # A group of its own: Ctrl-C is for the command, which then closes the session.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )
        try:
            _wait_until_open(process, local, said)
            yield local
        finally:
            _close(process)


def check_installed() -> None:
    """Raise UsageError unless the AWS CLI and its Session Manager plugin are installed."""
    for program, where in (("aws", AWS_CLI), ("session-manager-plugin", PLUGIN)):
        if shutil.which(program) is None:
            raise UsageError(f"command not found: {program}; install it: {where}")


def _wait_until_open(process: subprocess.Popen[bytes], port: int, said: IO[str]) -> None:
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _refused(_read(said))
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(POLL_SECONDS)
    raise HeadUnavailable(f"Session Manager opened no port in {OPEN_SECONDS:.0f} s ({one_line(_read(said))})")


def _refused(said: str) -> Exception:
    """Return the error for what the AWS CLI has printed."""
    line = one_line(re.sub(r"^.*?An error occurred ", "", said, flags=re.DOTALL)) or "it said nothing"
    if "TargetNotConnected" in said:
        return HeadUnavailable(
            "the head's instance is not connected to Session Manager: it is starting, or was replaced; try again in a "
            "minute, and then pulumi up, which finds the new one"
        )
    if "credential" in said.lower() or "ExpiredToken" in said:
        return UsageError(f"no AWS credentials that work ({line}); log in, or set AWS_PROFILE")
    return ResourceError(f"Session Manager opened no session ({line}); ray-on-ecs doctor looks for the cause")


def _read(said: IO[str]) -> str:
    said.seek(0)
    return said.read()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _close(process: subprocess.Popen[bytes]) -> None:
    """End the session. The plugin closes it in AWS, too, when it is interrupted, and the AWS CLI waits for that."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if _is_over(process, number, CLOSE_SECONDS):
                return
    finally:  # also when the user can't wait
        _is_over(process, signal.SIGKILL, 0)


def _is_over(process: subprocess.Popen[bytes], number: signal.Signals, seconds: float) -> bool:
    """Send a signal to the session's processes, and return whether they end within some seconds."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses the signal once they have ended
        os.killpg(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False
