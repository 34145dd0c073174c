"""Task scale-in protection: ECS does not stop the task of a node in use for a scale-in or a deployment.

A thread checks every few seconds whether this node is in use, and sets the protection through the ECS agent on the
instance. It does not run without ECS_AGENT_URI, as in containers elsewhere.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-scale-in-protection-endpoint.html
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ray_on_ecs.errors import failure_of, one_line
from ray_on_ecs.node import api
from ray_on_ecs.node.outage import Outage

logger = logging.getLogger(__name__)

AGENT_VARIABLE = "ECS_AGENT_URI"  # ECS sets it in every container
PATH = "/task-protection/v1/state"
# The delay until a node that comes into use is protected.
POLL_SECONDS = 10.0
RENEW_SECONDS = 60.0  # well before it expires
# Longer than a restart of the ECS agent, and short for a node whose process hangs: it is billed until then.
EXPIRES_MINUTES = 15
# A run that restarts its workers leaves its nodes unused for a minute.
IDLE_SECONDS = 120.0
# Longer than the agent's timeout for a call to ECS.
TIMEOUT_SECONDS = 10.0


def start(in_use: Callable[[], bool | None]) -> Callable[[], None]:
    """Start the thread, if this is an ECS task; it ends with this process. Return `Protection.release`."""
    agent = os.environ.get(AGENT_VARIABLE)
    if not agent:
        return lambda: None
    protection = Protection(f"{agent}{PATH}", in_use)
    threading.Thread(target=protection.run, name="protection", daemon=True).start()
    return protection.release


class Protection:
    """Protection of this node's task while the node is in use, and for `IDLE_SECONDS` longer unless that is None.

    While Ray doesn't answer, a node that was in use stays protected: a failing monitor must not end a run.
    """

    def __init__(self, url: str, in_use: Callable[[], bool | None]) -> None:
        self._url = url
        self._in_use = in_use
        self._needed_until = self._set_at = -math.inf
        self._is_set = False
        self._is_over = False
        self._updating = threading.Lock()
        self._outage = Outage("the protection of this task")

    def run(self) -> None:
        """Poll until the process ends."""
        while True:
            time.sleep(POLL_SECONDS)
            self.poll()

    def poll(self) -> None:
        """Check the use once, and set or renew the protection; a failure costs at most one line."""
        now = time.monotonic()
        is_needed = now <= self._needed_until
        check_failure = None
        try:
            is_in_use = self._in_use()
        except Exception as cause:
            check_failure, is_in_use = one_line(f"{type(cause).__name__}: {cause}"), is_needed
        if is_in_use:
            self._needed_until = now + IDLE_SECONDS
        elif is_in_use is None:
            self._needed_until = -math.inf
        # Also after a failed check: the protection may have to be renewed.
        update_failure = failure_of(lambda: self._update(now))
        cause = check_failure or update_failure
        if cause:
            logger.debug(f"the protection of this task has failed and is tried again ({cause})")
        self._outage.note(cause, now)

    def release(self) -> None:
        """Release the task for good: ECS may refuse to stop a protected one. After an OSError it is to be repeated."""
        self._is_over = True
        self._update(time.monotonic())

    def _update(self, now: float) -> None:
        with self._updating:  # a request to protect must not overtake the release
            is_needed = now <= self._needed_until and not self._is_over
            if is_needed and now - self._set_at >= RENEW_SECONDS:
                logger.debug("this node is in use: protecting its task")
                self._is_set = True  # even if the response is lost: it has to be released later
                put(self._url, {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES})
                self._set_at = now
            elif not is_needed and self._is_set:
                logger.debug("this node is idle or stops: releasing its task")
                put(self._url, {"ProtectionEnabled": False})
                self._is_set, self._set_at = False, -math.inf


def put(url: str, state: dict[str, Any]) -> None:
    """Send a state to the agent, which passes it on to ECS; OSError if it doesn't answer, or ECS refuses."""
    try:
        answer = api.ask(url, TIMEOUT_SECONDS, token="", method="PUT", body=state)
    except api.AnswerError as cause:
        raise OSError(f"ECS's agent doesn't answer at {url} ({cause.reason})") from cause
    # A response with status 200 may have a `failure` instead, such as DEPLOYMENT_BLOCKED if a service has more
    # protected tasks than its desired count.
    if not isinstance(answer, dict) or "protection" not in answer:
        raise OSError(f"ECS refuses: {json.dumps(answer)}")
