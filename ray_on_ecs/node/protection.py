"""Task scale-in protection: ECS stops no task of a node that is in use, neither for a scale-in nor for a deployment.

A thread asks every few seconds whether this node is in use, and tells ECS's agent on the instance. Where ECS_AGENT_URI
is not set, as in containers elsewhere, there is no thread.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-scale-in-protection-endpoint.html
"""

import json
import math
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from ray_on_ecs.errors import one_line
from ray_on_ecs.node import api

AGENT_VARIABLE = "ECS_AGENT_URI"  # ECS sets it in every container
PATH = "/task-protection/v1/state"
# Of a question to Ray; a node that is taken into use is protected after that time.
POLL_SECONDS = 10.0
RENEW_SECONDS = 60.0
# Longer than a restart of ECS's agent, and short enough for a node whose process hangs: it is billed until then.
EXPIRES_MINUTES = 15
# A run that starts its workers again leaves its nodes unused for a minute.
IDLE_SECONDS = 120.0
# The agent itself gives up a call to ECS earlier.
TIMEOUT_SECONDS = 10.0
# A failure that is over sooner is not worth a line, such as that of a Ray that still starts.
REPORT_SECONDS = 60.0


def start(name: str, in_use: Callable[[], bool]) -> None:
    """Start the thread, if this is a task of ECS; it ends with this process.

    Args:
        name: The command, with which the lines in the log begin.
        in_use: Whether this node is in use; it may raise whatever it likes.
    """
    if agent := os.environ.get(AGENT_VARIABLE):
        protection = Protection(name, f"{agent}{PATH}", in_use)
        threading.Thread(target=protection.run, name="protection", daemon=True).start()


class Protection:
    """Protects this node's task while the node is in use, and for `IDLE_SECONDS` longer.

    While Ray can't be asked, a node that was in use stays protected: a monitor that fails must end no run.

    Args:
        name: The command, with which the lines in the log begin.
        url: The agent's endpoint.
        in_use: Whether this node is in use.
    """

    def __init__(self, name: str, url: str, in_use: Callable[[], bool]) -> None:
        self._name, self._url, self._in_use = name, url, in_use
        self._wanted = self._set = False
        self._set_at = -math.inf
        self._idle_since: float | None = None
        self._failing_since: float | None = None
        self._is_reported = False

    def run(self) -> None:
        """Poll until the process ends."""
        while True:
            time.sleep(POLL_SECONDS)
            self.poll()

    def poll(self) -> None:
        """Ask Ray once, and tell the agent what has changed or has to be renewed; a failure is a line at most."""
        causes = [_failure(self._ask), _failure(self._tell)]
        self._report(next(filter(None, causes), None))

    def _ask(self) -> None:
        was_idle_since, self._idle_since = self._idle_since, None
        if self._in_use():
            self._wanted = True
            return
        self._idle_since = time.monotonic() if was_idle_since is None else was_idle_since
        self._wanted = self._wanted and time.monotonic() - self._idle_since < IDLE_SECONDS

    def _tell(self) -> None:
        is_due = self._wanted and time.monotonic() - self._set_at >= RENEW_SECONDS
        if self._wanted == self._set and not is_due:
            return
        if self._wanted:
            self._set = True  # even if the answer is lost: it has to be released later
            put(self._url, {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES})
            self._set_at = time.monotonic()
        else:
            put(self._url, {"ProtectionEnabled": False})
            self._set, self._set_at = False, -math.inf

    def _report(self, cause: str | None) -> None:
        """Print when a failure has lasted a while, and when it is over."""
        now = time.monotonic()
        if cause is None:
            if self._is_reported:
                self._print("works again")
            self._failing_since, self._is_reported = None, False
            return
        if self._failing_since is None:
            self._failing_since = now
        if not self._is_reported and now - self._failing_since >= REPORT_SECONDS:
            self._is_reported = True
            self._print(f"has failed for {REPORT_SECONDS:.0f} s ({cause}); trying again")

    def _print(self, what: str) -> None:
        print(f"{self._name}: the protection of this task {what}", file=sys.stderr, flush=True)


def put(url: str, state: dict[str, Any]) -> None:
    """Send a state to the agent's endpoint, which passes it on to ECS.

    Raises:
        OSError: The agent does not answer, or ECS refuses.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(state).encode(), headers, method="PUT")
    try:
        with api.OPENER.open(request, timeout=TIMEOUT_SECONDS) as response:
            answer = json.loads(response.read())
    except HTTPError as refusal:
        raise OSError(f"ECS's agent answers {refusal.code}: {refusal.read().decode(errors='replace')}") from None
    except (HTTPException, ValueError) as cause:
        raise OSError(f"not an answer of ECS's agent: {cause!r}") from cause
    # An answer of 200 may have a `failure` in its place, such as DEPLOYMENT_BLOCKED where a service has more protected
    # tasks than it is to have.
    if "protection" not in answer:
        raise OSError(f"ECS refuses: {json.dumps(answer)}")


def _failure(call: Callable[[], None]) -> str | None:
    """Call; return why it failed, on one line, or None."""
    try:
        call()
    except Exception as cause:
        return one_line(f"{type(cause).__name__}: {cause}")
    return None
