"""Port forwarding into the stack's VPC through Session Manager.

`aws ssm start-session` and its plugin forward the port; their processes end with the context.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

from ray_on_ecs.cluster import aws
from ray_on_ecs.errors import HeadUnavailable, ResourceError, UsageError, one_line

OPEN_SECONDS = 60.0  # AWS's agent may have to open it again
CLOSE_SECONDS = 5.0  # the plugin tells AWS first
# The plugin's line once it listens.
OPENED = re.compile(r"Port (\d+) opened for sessionId")
AWS_CLI = "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
PLUGIN = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"


@contextmanager
def forwarded_port(
    region: str, instance_id: str, document: str, host: str, port: int, environment: Mapping[str, str]
) -> Generator[int]:
    """Forward a local port to `host:port` through an instance; yields the local port.

    The host's name is as the instance resolves it, and the environment has the credentials of the AWS CLI.
    """
    for program, instructions in (("aws", AWS_CLI), ("session-manager-plugin", PLUGIN)):
        if shutil.which(program) is None:
            raise UsageError(f"command not found: {program}; install it: {instructions}")
    # The plugin chooses a free port. Another user of this machine could bind one that the command's arguments name, and
    # would receive the token.
    parameters = {"host": [host], "portNumber": [str(port)], "localPortNumber": ["0"]}
    command = [
        *("aws", "ssm", "start-session", "--region", region, "--target", instance_id),
        *("--document-name", document, "--parameters", json.dumps(parameters)),
    ]
    with tempfile.TemporaryFile("w+") as output:
        # A new process group: Ctrl-C goes to the command only, which then closes the session.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )
        try:
            yield _opened_port(process, output)
        finally:
            _close(process)


def _opened_port(process: subprocess.Popen[bytes], output: IO[str]) -> int:
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _session_error(_read(output))
        if opened := OPENED.search(_read(output)):
            return int(opened[1])
        time.sleep(0.05)
    raise HeadUnavailable(
        f"Session Manager did not open a port within {OPEN_SECONDS:.0f} s ({one_line(_read(output))})"
    )


def _session_error(output: str) -> Exception:
    line = one_line(re.sub(r"^.*?An error occurred ", "", output, flags=re.DOTALL)) or "without a message"
    if "TargetNotConnected" in output:
        return HeadUnavailable(
            "the head's instance is not connected to Session Manager: it is starting, or was replaced; try again in a "
            "minute, and then pulumi up, which finds the new one"
        )
    if "credential" in output.lower() or "ExpiredToken" in output:
        return aws.credentials_error(line)
    return ResourceError(f"Session Manager did not open a session ({line}); ray-on-ecs doctor looks for the cause")


def _read(output: IO[str]) -> str:
    """Return what the processes have written; their position in the file stays where it is."""
    return os.pread(output.fileno(), 2**16, 0).decode(errors="replace")


def _close(process: subprocess.Popen[bytes]) -> None:
    """End the session. On SIGINT the plugin also closes it in AWS, and the AWS CLI waits for the plugin."""
    try:
        _signal(process, signal.SIGINT)
    finally:  # also on a second Ctrl-C
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the session's processes, and wait for their end for a while."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses the signal once they have ended
        os.killpg(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_SECONDS)
