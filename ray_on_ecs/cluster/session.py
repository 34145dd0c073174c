"""Sessions of Session Manager with the head's instance: boto3 starts them, and Session Manager's plugin holds them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.errors import HeadUnavailable, ResourceError, TrainingError, UsageError, one_line

PLUGIN = "session-manager-plugin"
INSTRUCTIONS = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
)
PLUGIN_SECONDS = 10.0  # a program may hang
OPEN_SECONDS = 60.0  # AWS's agent may have to open it again
CLOSE_SECONDS = 5.0  # the plugin tells AWS first
# The plugin's line once it listens.
OPENED = re.compile(r"Port (\d+) opened for sessionId")
# The plugin takes the session's token from this variable; older ones take an argument, which other users can read.
RESPONSE, LAST_WITHOUT_VARIABLE = "AWS_SSM_START_SESSION_RESPONSE", [1, 2, 497, 0]


def plugin_version() -> str:
    """Return the version of Session Manager's plugin; UsageError if it does not start."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    try:
        return subprocess.run([PLUGIN, "--version"], timeout=PLUGIN_SECONDS, check=True, **options).stdout.strip()
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: {PLUGIN}; install it: {INSTRUCTIONS}") from cause
    except (OSError, subprocess.SubprocessError) as cause:
        reason = one_line(getattr(cause, "stderr", None) or cause)
        raise UsageError(f"{PLUGIN} --version fails ({reason}); install it again: {INSTRUCTIONS}") from cause


@contextmanager
def started(
    stack: Stack,
    document: str,
    parameters: dict[str, list[str]] | None = None,
    program: Callable[..., AbstractContextManager[subprocess.Popen[Any]]] = subprocess.Popen,
    **options: Any,
) -> Generator[subprocess.Popen[Any]]:
    """Start a session by a document; yields the plugin's process, which `program` starts with these options."""
    version, environment = plugin_version(), aws.variables()
    instance_id = aws.head_instance(stack)
    if not instance_id:  # of a stack whose head sleeps, the outputs have none
        raise HeadUnavailable(
            "the head has no task on an instance: it is starting, or sleeps; try again in a minute, and "
            "ray-on-ecs status shows what it waits for"
        )
    request: dict[str, Any] = {"Target": instance_id, "DocumentName": document}
    if parameters:
        request["Parameters"] = parameters
    answer = _start(stack, request)
    response = json.dumps({name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")})
    if [int(part) for part in re.findall(r"\d+", version)] > LAST_WITHOUT_VARIABLE:
        environment[RESPONSE], response = response, RESPONSE
    endpoint = aws.client_of("ssm", stack).meta.endpoint_url
    arguments = (response, stack.region, "StartSession", "", json.dumps(request), endpoint)
    process = None
    try:
        with program([PLUGIN, *arguments], env=environment, **options) as process:
            yield process
    finally:
        if process is None or process.poll() != 0:  # otherwise the plugin has ended the session in AWS
            with suppress(TrainingError):
                aws.call(stack, "ssm", "terminate_session", SessionId=answer["SessionId"])


def _start(stack: Stack, request: dict[str, Any]) -> Any:
    try:
        return aws.call(stack, "ssm", "start_session", **request)
    except aws.Refused as refused:
        if refused.code == "TargetNotConnected":
            raise HeadUnavailable(
                "the head's instance is not connected to Session Manager: it is starting, or was replaced; try again "
                "in a minute, and then pulumi up, which finds the new one"
            ) from refused
        raise _not_opened(str(refused)) from refused


def _not_opened(reason: str) -> ResourceError:
    return ResourceError(f"Session Manager did not open a session ({reason}); ray-on-ecs doctor looks for the cause")


@contextmanager
def forwarded_port(stack: Stack, host: str, port: int) -> Generator[int]:
    """Forward a local port to `host:port`, as the head's instance resolves the host; yields the local port.

    The plugin's process ends with the context.
    """
    # The plugin chooses a free port. Another user of this machine could bind one that the command's arguments name, and
    # would receive the token.
    parameters = {"host": [host], "portNumber": [str(port)], "localPortNumber": ["0"]}
    with tempfile.TemporaryFile("w+") as output:
        # A new process group: Ctrl-C goes to the command only, which then closes the session.
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        with started(stack, stack.forward_document, parameters, start_new_session=True, **streams) as process:
            try:
                yield _opened_port(process, output)
            finally:
                _close(process)


def _opened_port(process: subprocess.Popen[Any], output: IO[str]) -> int:
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _not_opened(one_line(_read(output)) or "without a message")
        if opened := OPENED.search(_read(output)):
            return int(opened[1])
        time.sleep(0.05)
    raise HeadUnavailable(
        f"Session Manager did not open a port within {OPEN_SECONDS:.0f} s ({one_line(_read(output))})"
    )


def _read(output: IO[str]) -> str:
    """Return what the plugin has written; its position in the file stays where it is."""
    return os.pread(output.fileno(), 2**16, 0).decode(errors="replace")


def _close(process: subprocess.Popen[Any]) -> None:
    """End the session. On SIGINT the plugin also closes it in AWS."""
    try:
        _signal(process, signal.SIGINT)
    finally:  # also on a second Ctrl-C
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal to the plugin, which may be a script with children, and wait for its end for a while."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses the signal once they have ended
        os.killpg(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_SECONDS)
