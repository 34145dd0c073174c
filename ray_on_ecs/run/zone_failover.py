"""Reason why EC2 starts no workers while a run waits for them, and the move to the next zone if the stack has several.

The Auto Scaling group of the stack tries again by itself. But what it lacks stands only in its activities, where a user
who waits for a job does not look, and it never leaves its zone.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from ray_on_ecs.aws import DENIED, client
from ray_on_ecs.cluster_info import ClusterInfo, Zone
from ray_on_ecs.errors import one_line
from ray_on_ecs.starting.cause import explain, members
from ray_on_ecs.starting.launches import RECENT, in_subnets, launch_line, newest_failure, without_ids
from ray_on_ecs.starting.look import ACTIVITIES, WorkersLook
from ray_on_ecs.starting.states import CAPACITY, SPOT, Phase

logger = logging.getLogger(__name__)

POLL_SECONDS = 20.0  # AWS throttles more frequent requests
# Time without a new instance after which a zone that has only some of the instances is given up for another.
PATIENCE = timedelta(minutes=5)
# AWS's codes of requests that stay wrong, as for a subnet or an instance that is gone. A denied one only a person
# changes. After other failures, such as throttling or a lost answer, the next look repeats the request.
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/CommonErrors.html
INVALID = {"ValidationError"}


def autoscaling_client() -> Any:
    """Return a client that gives up soon: the driver looks for room on the same thread, and will ask again."""
    return client("autoscaling", connect_seconds=2, read_seconds=3, attempts=1)


class ZoneFailover:
    """Looks at the workers' Auto Scaling group while a run waits for them.

    The workers of a job are in one zone, unless the stack spreads them. When EC2 has too few there, and nothing would
    be lost, it moves the group to the next zone: at once if it has none, and after some minutes if it has a part
    of them. Each zone is tried once in a wait; then the group goes back to the one that had the most, and stays.

    A group may ask for more than the run needs: ECS starts two instances where there was none. So it never moves while
    its zone has as many as the run needs.

    Args:
        workers: The workers as the stack has them.
        needed: The number of instances without which the run can't begin.
        is_idle: Returns whether no instance of theirs is in use.
        others_wait: Returns whether another job waits for workers: instances that have not joined Ray yet may be its.
        latest: Returns the workers as the stack has them now; None if that is not known.
        connect: Makes a boto3 client of EC2 Auto Scaling.
        now: Returns the time.
        workers_look: Asks AWS for what else may keep the workers from starting.

    Attributes:
        shortage: Why the workers don't start, and the way out, on one line; empty while nothing is known to be wrong.
    """

    def __init__(
        self,
        workers: ClusterInfo,
        needed: int,
        is_idle: Callable[[], bool],
        others_wait: Callable[[], bool],
        latest: Callable[[], ClusterInfo | None] = lambda: None,
        connect: Callable[[], Any] = autoscaling_client,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        workers_look: WorkersLook | None = None,
    ) -> None:
        self._workers = workers
        self._workers_look = workers_look or WorkersLook(workers)
        self._needed = needed
        self._now = now
        self._is_idle = is_idle
        self._others_wait = others_wait
        self._latest = latest
        self._connect = connect
        self._next_look_at = 0.0
        self._zone: str | None = ""  # where the group was at the last look; None outside of the stack's zones
        self._moved_at: datetime | None = None
        self._began: datetime | None = None
        self._most: dict[str, int] = {}  # the most instances that each zone has had, in the order of the attempts
        self._is_last = False  # whether the group stays where it is
        self._lacking_since: datetime | None = None
        self._count = 0
        self._shown_lines = {""}
        self._has_failed = False
        self._failed: set[str] = set()  # changes whose failure is shown
        self._invalid_zones: set[str] = set()
        self._denied_until = datetime.min.replace(tzinfo=UTC)
        self.shortage = ""

    def look_if_due(self) -> None:
        """Look at the group if the last time is a while ago. A failure is shown once, and the wait continues."""
        if time.monotonic() < self._next_look_at:
            return
        try:
            self.look()
        except Exception as cause:
            if not self._has_failed:
                logger.warning(f"AWS does not tell how the workers are doing; waiting all the same ({one_line(cause)})")
            self._has_failed = True
            self._show(self._explain(None, None))
        self._next_look_at = time.monotonic() + POLL_SECONDS

    def look(self) -> None:
        """Look at the group, and move it if that may help. A change that fails is one line, and the wait continues.

        Raises:
            Exception: AWS doesn't answer a question, or refuses it; any of boto's errors.
        """
        latest = self._latest()
        if latest and latest != self._workers:  # such as one with more zones, which the line about a shortage asks for
            self._workers, self._is_last, self._invalid_zones = latest, False, set()
            self._workers_look = self._workers_look.of(latest)
        groups = self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[self._workers["group"]])
        group = next(iter(groups["AutoScalingGroups"]), None)
        if group is None:
            self._show(f"Auto Scaling group {self._workers['group']} not found; pulumi up creates it")
            return
        instances = members(group, Phase.RUNNING, Phase.STARTING)
        subnets = group["VPCZoneIdentifier"].split(",")
        names = self._zone_names(subnets)
        # None if the group is in a zone that is not the stack's, or in several.
        self._note_zone(names[0] if len(names) == len(subnets) == 1 else None)
        here = [instance for instance in instances if self._zone in (None, instance["AvailabilityZone"])]
        answer = self._client.describe_scaling_activities(
            AutoScalingGroupName=self._workers["group"], MaxRecords=ACTIVITIES
        )
        # An earlier failure in this zone is not of this wait's attempt.
        activities = in_subnets(answer["Activities"], subnets, self._moved_at)
        failure = newest_failure(activities, self._now() - RECENT)
        if len(here) >= self._needed:  # they are about to join
            failure = None
        logger.debug(f"{self._zone}: {len(here)} of {self._needed} instances, {failure or 'no failure'}")
        may_give_up = self._note_count(len(here), failure)
        target = self._next_zone(failure)
        if target and may_give_up and self._is_idle() and not (instances and self._others_wait()):
            if self._move(target, failure):
                failure, activities = None, []
            target = None
        self._show(self._describe(failure, subnets, target) if failure else self._explain(group, activities))
        self._terminate_in_other_zones(instances)

    @cached_property
    def _client(self) -> Any:
        return self._connect()

    def _note_zone(self, zone: str | None) -> None:
        if self._zone not in ("", zone):
            self._moved_at = self._now()
            self._lacking_since, self._count = None, 0
        self._zone = zone
        if zone:
            self._most.setdefault(zone, 0)

    def _note_count(self, count: int, failure: str | None) -> bool:
        """Note the zone's number of instances; return whether it has lacked more for long enough to be given up."""
        if self._zone:
            self._most[self._zone] = max(self._most[self._zone], count)
        if failure is None or count > self._count:  # each that comes lets the others hope
            self._lacking_since = None
        self._count = count
        self._lacking_since = self._lacking_since or self._now()
        return not count or self._now() - self._lacking_since >= PATIENCE

    def _next_zone(self, failure: str | None) -> Zone | None:
        """Return the zone to move to, or None to stay."""
        zones = self._workers["zones"]
        if self._workers["spread"] or len(zones) == 1 or self._is_last or self._now() < self._denied_until:
            return None
        zones = [zone for zone in zones if zone["zone"] == self._zone or zone["zone"] not in self._invalid_zones]
        if self._zone is None:
            return zones[0] if zones and self._count < self._needed else None
        if not failure or not CAPACITY.pattern.search(failure):
            return None
        here = [zone["zone"] for zone in zones].index(self._zone)
        for zone in zones[here:] + zones[:here]:
            if zone["zone"] not in self._most:
                return zone
        best = max(zones, key=lambda zone: (self._most[zone["zone"]], zone["zone"] == self._zone))
        is_better = best["zone"] != self._zone and self._most[best["zone"]] > self._count
        return best if is_better else None

    def _move(self, zone: Zone, failure: str | None) -> bool:
        """Move the group; return whether AWS has done it."""
        name = zone["zone"]
        code = self._failure_of(
            f"move the workers to {name}",
            self._client.update_auto_scaling_group,
            AutoScalingGroupName=self._workers["group"],
            VPCZoneIdentifier=zone["subnet_id"],
            PlacementGroup=zone["placement_group"] or "",  # empty takes the present one away
        )
        if code in INVALID:
            self._invalid_zones.add(name)
        if code in DENIED:
            self._denied_until = self._now() + PATIENCE
        if code is not None:
            return False
        reason = "the workers are not in one of the stack's zones"
        if self._zone and failure:
            number = f"only {self._count} of {self._needed}" if self._count else "no"
            reason = f"{number} {self._types(failure)} in {self._zone}"
        if name in self._most:
            self._is_last = True
            logger.info(f"{reason}; moving the workers back to {name}, which had {self._most[name]}, to stay there")
        else:
            logger.info(f"{reason}; moving the workers to {name}")
        self._note_zone(name)
        return True

    def _failure_of(
        self, what: str, call: Callable[..., object], is_done: Collection[str] = (), **given: Any
    ) -> str | None:
        """Change something in AWS; return the error's code, empty without an answer, and None if it is done.

        A failure is one line, unless its code means that another caller has done it.
        """
        try:
            call(**given)
        except Exception as cause:  # any of boto's errors
            response = getattr(cause, "response", None) or {}  # None if there was no answer
            code = str(response.get("Error", {}).get("Code", ""))
            if code in is_done:
                logger.debug(f"{what}: {one_line(cause)}")
                return None
            if what not in self._failed:
                logger.warning(f"cannot {what} (AWS {'refuses' if code else 'does not answer'}: {one_line(cause)})")
            self._failed.add(what)
            return code
        return None

    def _terminate_in_other_zones(self, instances: Sequence[Any]) -> None:
        """After a move, terminate the group's instances in other zones; it starts as many in the new zone.

        Not if they are as many as the run needs and the new zone has fewer: another job may have moved the group.
        """
        if not self._moved_at or not self._zone:
            return
        by_zone: defaultdict[str, list[str]] = defaultdict(list)
        for instance in instances:
            by_zone[instance["AvailabilityZone"]].append(instance["InstanceId"])
        has_enough = len(by_zone.pop(self._zone, ())) >= self._needed
        to_terminate: list[str] = []
        for instance_ids in by_zone.values():
            if has_enough or len(instance_ids) < self._needed:
                to_terminate += instance_ids
        if not to_terminate or not self._is_idle() or self._others_wait():
            return
        for instance_id in to_terminate:
            self._failure_of(
                "terminate the workers in other zones",
                self._client.terminate_instance_in_auto_scaling_group,
                is_done=INVALID,  # the instance is gone
                InstanceId=instance_id,
                ShouldDecrementDesiredCapacity=False,
            )

    def _describe(self, failure: str, subnets: Sequence[str], target: Zone | None) -> str:
        """Return what a failure means, and the way out of it."""
        zones = [*self._most] or self._zone_names(subnets) or subnets
        where = zones[0] if len(zones) == 1 else f"any of {', '.join(zones)}"
        number = "no"
        if self._count:
            number = f"only {self._count} of {self._needed}"
            where = self._zone or where
        way_out = ""
        if target:
            if_it_lasts = f", if EC2 has no more for {PATIENCE.seconds // 60} minutes" if self._count else ""
            way_out = f"the workers move to {target['zone']} as soon as no GPU is in use{if_it_lasts}"
        return launch_line(failure, self._workers["types"], where, number, way_out)

    def _explain(self, group: Any, activities: Sequence[Any] | None) -> str:
        """Return what else keeps the workers from starting."""
        nodes, now = self._workers_look.nodes(group, activities), self._now()
        self._began = self._began or now
        return explain(nodes, now, self._needed, now - self._began)

    def _show(self, shortage: str) -> None:
        self.shortage = shortage
        line = without_ids(shortage)
        if line not in self._shown_lines:
            self._shown_lines.add(line)
            logger.info(shortage)

    def _types(self, failure: str) -> str:
        return f"{' or '.join(self._workers['types'])}{' on spot' if SPOT.search(failure) else ''}"

    def _zone_names(self, subnets: Sequence[str]) -> list[str]:
        """Return the names of the stack's zones that these subnets are in."""
        return [zone["zone"] for zone in self._workers["zones"] if zone["subnet_id"] in subnets]
