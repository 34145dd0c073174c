"""Notices of EC2 and EC2 Auto Scaling: the end of this node's instance, and signs of it.

The instance passes on the texts of its metadata service (`infra.definitions.user_data`), because a task can't ask it.
In a Capacity Block, whose end is not among them, EC2 is asked for it (`ray_on_ecs.node.block`).
When the instance ends, `ray-worker` releases its task, as ECS may not stop a protected one when it drains the instance,
and has Ray drain the node until shortly before EC2's time. A text that is not one of AWS's means nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ray_on_ecs.contract import (
    INSTANCE_FILE_VARIABLE,
    LIFECYCLE_STATE,
    NOTICES_FILE,
    REBALANCE,
    SCHEDULED_EVENTS,
    SPOT_ACTION,
)
from ray_on_ecs.node.block import Block
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.reservations import WARNED
from ray_on_ecs.tracking.starts import moment

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
# The instance writes the file every second; an older one may be from before a reboot.
OLD_SECONDS = 60.0
# A scheduled event is the end of its instance from so long before its time until so long after it.
EVENT_SECONDS, SURVIVED_SECONDS = 300.0, 600.0
# The rest of EC2's time after Ray's deadline, in which the last files are stored.
STORE_SECONDS = 30.0
# Ray's time on SIGTERM, and that for an end without a time.
DRAIN_VARIABLE, DRAIN_SECONDS = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 90.0

# Actions of EC2 at a Spot interruption.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
SPOT_ACTIONS = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}
# Target lifecycle states of an instance that is about to stop.
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/retrieving-target-lifecycle-state-through-imds.html
LIFECYCLE_ENDS = ("Terminated", "Warmed:Hibernated", "Warmed:Stopped", "Warmed:Terminated")
# An event of each of these codes interrupts the instance, if it is active: maintenance may be of its power or network.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-instances-status-check_sched.html
EVENT_CODES = ("instance-stop", "instance-retirement", "instance-reboot", "system-reboot", "system-maintenance")
# How long a node that starts waits for the end of its Capacity Block; EC2 answers or fails sooner.
BLOCK_SECONDS = 15.0
_block = Block()


@dataclass(frozen=True)
class End:
    """End of the instance."""

    what: str  # a clause for the log
    at: float | None  # its time (Unix time), or None if AWS does not name it
    # True for a scheduled event, for which neither ECS nor EC2 Auto Scaling replaces the instance.
    is_event: bool = False
    # It counts from so long before its time until so long after it, if it is among the events.
    before: float = EVENT_SECONDS
    after: float = SURVIVED_SECONDS


@dataclass(frozen=True)
class Notices:
    """Notices of AWS for an instance."""

    ends: tuple[End, ...] = ()  # its end by EC2 or EC2 Auto Scaling
    events: tuple[End, ...] = ()  # interruptions that EC2 has scheduled, often days ahead, and a Capacity Block's end
    recommendation: str = ""  # time of EC2's recommendation to replace it, as EC2 writes it, or nothing

    def end(self, now: float) -> End | None:
        """Return the end that leaves the least time, of those that have begun or are near."""
        near = [
            event for event in self.events if event.at is not None and -event.after <= event.at - now <= event.before
        ]
        return min([*self.ends, *near], key=lambda end: deadline_of(end, now), default=None)


def of_instance() -> Notices:
    """Return the notices that the instance has passed on; of a file that is absent, old or broken, none."""
    instance = os.environ.get(INSTANCE_FILE_VARIABLE)
    if not instance:
        return Notices()
    file = Path(instance).with_name(NOTICES_FILE)
    try:
        is_old = time.time() - file.stat().st_mtime > OLD_SECONDS
        return Notices() if is_old else parse(_load(file.read_text()))
    except (OSError, ValueError):
        return Notices()


def of_node(wait_seconds: float = 0.0) -> Notices:
    """Return the instance's notices and the end of its Capacity Block, waiting so long for EC2's first answer.

    For `ray-worker` alone, so that each node asks EC2 once in a while, and not each rank of a run.
    """
    end = _of_block(wait_seconds)
    notices = of_instance()
    return replace(notices, events=(*notices.events, end)) if end else notices


def parse(texts: object) -> Notices:
    """Return the notices in the texts of the metadata service, by their paths there."""
    if not isinstance(texts, dict):
        return Notices()
    ends = (_spot(_load(texts.get(SPOT_ACTION))), _lifecycle(texts.get(LIFECYCLE_STATE)))
    events = _load(texts.get(SCHEDULED_EVENTS))
    recommendation = _load(texts.get(REBALANCE))
    told_at = recommendation.get("noticeTime") if isinstance(recommendation, dict) else None
    return Notices(
        tuple(end for end in ends if end),
        tuple(filter(None, map(_event, events if isinstance(events, list) else ()))),
        told_at if isinstance(told_at, str) and moment(told_at) else "",
    )


def wait_for_end() -> None:
    """Return at once, or wait as long as this instance ends: a run would lose a node that joins now."""
    if end := of_node(BLOCK_SECONDS).end(time.time()):
        logger.info(f"{end.what}; this node doesn't join the cluster")
    while of_node().end(time.time()):
        time.sleep(POLL_SECONDS)


def start(
    release: Callable[[], None], drain: Callable[[float, str], None], replace: Callable[[], None]
) -> Callable[[], None]:
    """Start a Watch on a thread, on an instance of the stack; it ends with this process. Return `Watch.stopping`."""
    watch = Watch(release, drain, replace)
    if INSTANCE_FILE_VARIABLE in os.environ:
        threading.Thread(target=watch.run, name="notice", daemon=True).start()
    return watch.stopping


class Watch:
    """Watch of this instance's notices.

    `release` releases the task's protection for good, `drain` has Ray drain the node until a deadline (Unix time) for a
    reason, and `replace` has EC2 Auto Scaling replace the instance.
    """

    def __init__(
        self, release: Callable[[], None], drain: Callable[[float, str], None], replace: Callable[[], None]
    ) -> None:
        self._release, self._drain, self._replace = release, drain, replace
        self._said: set[str] = set()
        self._what = ""
        self._deadline: float | None = None
        self._is_released = self._is_replaced = False
        self._releasing: threading.Thread | None = None
        self._outages: dict[str, Outage] = {}

    def run(self) -> None:
        """Poll until the process ends."""
        while True:
            self._try("the watch of this instance's notices", self.poll)
            time.sleep(POLL_SECONDS)

    def stopping(self) -> None:
        """Note SIGTERM, after which the container has no longer than ECS's stop timeout."""
        if self._deadline is not None:
            self._deadline = min(self._deadline, time.time() + _drain_seconds())

    def poll(self) -> None:
        """Look once. An end holds, whatever follows; a failure is tried again and costs one line."""
        notices, now = of_node(), time.time()
        for event in notices.events:
            self._say(f"EC2 has scheduled {event.what}")
        if notices.recommendation:
            self._say(
                f"EC2 recommends since {notices.recommendation} to replace this instance: each run here saves a "
                "checkpoint and goes on"
            )
        if end := notices.end(now):
            deadline = deadline_of(end, now)
            if self._deadline is None or deadline < self._deadline:
                self._what, self._deadline = end.what, deadline
                self._say(f"{end.what}: draining this node")
            if end.is_event and not self._is_replaced:
                self._is_replaced = True
                threading.Thread(target=self._replace, name="replace", daemon=True).start()
        if self._deadline is None:
            return
        self._release_soon()
        # Again and again: another head may not know of it, and on SIGTERM Ray sets a later deadline.
        if now < self._deadline:
            deadline = self._deadline
            self._try("the drain of this node", lambda: self._drain(deadline, self._what))

    def _release_soon(self) -> None:
        """Release the task first, but don't wait for an agent that hangs."""

        def release() -> None:
            self._is_released = self._try("the release of this task's protection", self._release)

        if self._is_released:
            return
        if self._releasing is None or not self._releasing.is_alive():
            self._releasing = threading.Thread(target=release, name="release", daemon=True)
            self._releasing.start()
        self._releasing.join(POLL_SECONDS)

    def _try(self, what: str, call: Callable[[], object]) -> bool:
        return self._outages.setdefault(what, Outage(what, seconds=0)).attempt(call, time.time())

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.info(line)


def deadline_of(end: End, now: float) -> float:
    """Return Ray's deadline for an end; without a time, or after it, the one that SIGTERM would set."""
    if end.at is None or end.at <= now:
        return now + _drain_seconds()
    return end.at - min(STORE_SECONDS, (end.at - now) / 2)


def _drain_seconds() -> float:
    """Return Ray's time on SIGTERM; a number that is none is its default, since Ray says so itself."""
    try:
        return float(os.environ.get(DRAIN_VARIABLE) or DRAIN_SECONDS)
    except ValueError:
        return DRAIN_SECONDS


def _spot(notice: Any) -> End | None:
    action = notice.get("action") if isinstance(notice, dict) else None
    if not isinstance(action, str) or action not in SPOT_ACTIONS:
        return None
    at = moment(notice.get("time"))
    return End(f"EC2 {SPOT_ACTIONS[action]} this Spot Instance{_when(at)}", at)


def _lifecycle(state: object) -> End | None:
    if state not in LIFECYCLE_ENDS:
        return None
    return End(f"EC2 Auto Scaling takes this instance out of service (target lifecycle state {state})", None)


def _event(event: Any) -> End | None:
    try:
        code, state, at = event["Code"], event["State"], parsedate_to_datetime(event["NotBefore"]).timestamp()
        is_due = code in EVENT_CODES and state == "active"
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return End(f"{code} of this instance{_when(at)}", at, is_event=True) if is_due else None


def _of_block(wait_seconds: float) -> End | None:
    """Return the end of this instance by the end of its Capacity Block, which it does not survive."""
    found = _block.current(wait_seconds)
    if found is None or found.terminates_at is None:
        return None
    at = found.terminates_at.timestamp()
    return End(f"the end of this instance in {found}{_when(at)}", at, before=WARNED.total_seconds(), after=math.inf)


def _when(at: float | None) -> str:
    return "" if at is None else f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _load(text: object) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
