"""Reason why EC2 starts no workers in a node group while a run waits there. Nothing here changes anything in AWS.

The Auto Scaling group tries again by itself. But what it lacks stands only in its activities, where a user who waits
for a run does not look.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import one_line
from ray_on_ecs.reservations import parse
from ray_on_ecs.starting.cause import Nodes, explain, members
from ray_on_ecs.starting.launches import launch_line, newest_failure, without_ids
from ray_on_ecs.starting.look import ACTIVITIES, Ask, Look, WorkersLook, ask_soon
from ray_on_ecs.starting.states import OF_PLACE, Phase, launch_error

logger = logging.getLogger(__name__)

POLL_SECONDS = 20.0  # AWS throttles more frequent requests


class Shortage:
    """Looks at a node group while a run waits for its nodes.

    Args:
        info: The workers as the stack has them.
        kind: The kind of node.
        needed: Returns the number of the group's instances with which the run has room, and of those that others fill.
        since: The time at which the run began to wait there; earlier refusals are ignored.

    Attributes:
        line: The reason why the workers don't start, and the way out, on one line; empty while nothing is wrong.
        refusal: AWS's words if it refuses instances for what another type or zone may have, such as capacity; or empty.
        reason: The line of that refusal, without the way out.
        most: The most instances that the group has had for the run.
    """

    def __init__(
        self,
        info: ClusterInfo,
        kind: str,
        needed: Callable[[], tuple[int, int]],
        since: datetime,
        ask: Ask = ask_soon,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._group = info["groups"][kind]
        self._ask, self._workers_look = ask, WorkersLook(info, kind, ask)
        self._needed, self._since, self._now = needed, since, now
        self._next_look_at = 0.0
        self._shown = {""}
        self.line = self.refusal = self.reason = ""
        self.most = 0
        self._starts_at: datetime | None = None

    @property
    def is_before_start(self) -> bool:
        """True until the start of the group's reservation, as EC2 last told it."""
        return self._starts_at is not None and self._now() < self._starts_at

    def look_if_due(self) -> None:
        """Look if the last time is a while ago. A look that fails changes nothing, and the wait continues."""
        if time.monotonic() < self._next_look_at:
            return
        try:
            self.look()
        except Exception as cause:
            logger.debug(f"AWS does not tell how the workers are doing ({one_line(cause)})")
        self._next_look_at = time.monotonic() + POLL_SECONDS

    def look(self) -> None:
        """Look at the group; print a line that is new."""
        nodes, (needed, of_others), now = self._ask_aws(), self._needed(), self._now()
        number = len(members(nodes.group, Phase.RUNNING, Phase.STARTING))
        self.most = max(self.most, number - of_others)
        # With as many as the run needs, they are about to join; the group may ask for more.
        failure = newest_failure(nodes.activities or (), self._since) if nodes.group and number < needed else None
        self.refusal = failure if failure and launch_error(failure) in OF_PLACE else ""
        have, zones = f"only {number} of {needed}" if number else "no", " or ".join(self._group["zones"])
        self.reason = launch_line(self.refusal, self._group["types"], zones, have).partition(";")[0]
        if why := self._reservation(now, is_refused=bool(failure)):
            self.refusal = self.reason = why
            waits = ", or waits for the start" if self.is_before_start else ""
            self._show(f"{why}; the run goes to its next pool, if it has one (--pool){waits}")
        elif nodes.group is None and not nodes.unknown:
            self._show(f"Auto Scaling group {self._group['group']} not found; pulumi up creates it")
        else:
            self._show(explain(nodes, now, needed, max(now - self._since, timedelta())))
        logger.debug(f"{self._group['group']}: {number} of {needed} instances, {failure or 'no failure'}")

    def _reservation(self, now: datetime, *, is_refused: bool) -> str:
        """Return why the group's reservation gets no instances; empty without one, and if EC2 does not tell.

        Its nodes may still be there: they are about to end, and don't join any longer.
        """
        reserved = self._group.get("reservation")
        if reserved is None:
            return ""
        which = {"CapacityReservationIds": [reserved["id"]]}
        listed = Look(self._ask, "").listed("ec2", "describe_capacity_reservations", "CapacityReservations", **which)
        found = parse({"CapacityReservations": listed})
        if found is None:
            return ""
        self._starts_at = found.starts_at
        full = f"{found} has {found.free} of its {found.count} instances free" if is_refused and not found.free else ""
        return found.closed(now) or full

    def _ask_aws(self) -> Nodes:
        name, look = self._group["group"], Look(self._ask, "")
        group = look.group(name)
        which = {"AutoScalingGroupName": name, "MaxRecords": ACTIVITIES}
        asks = group is not None
        activities = look.listed("autoscaling", "describe_scaling_activities", "Activities", **which) if asks else None
        nodes = self._workers_look.nodes(group, activities)
        return replace(nodes, unknown={**look.unknown, **nodes.unknown})

    def _show(self, line: str) -> None:
        self.line = line
        known = without_ids(line)
        if known not in self._shown:
            self._shown.add(known)
            logger.info(line)
