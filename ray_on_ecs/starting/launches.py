"""Launches of an Auto Scaling group, from its scaling activities: the last failure, slow ones, and short lives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_on_ecs.contract import DEFAULT_POOL
from ray_on_ecs.errors import counted, one_line
from ray_on_ecs.pools import setting
from ray_on_ecs.starting import states
from ray_on_ecs.starting.states import LaunchError, Phase

Activity = Mapping[str, Any]

# An older failure is outdated, since the group tries again every few minutes.
RECENT = timedelta(minutes=15)
# A launch that takes longer is slow. An instance boots and registers with ECS within a minute or two.
SLOW = timedelta(minutes=3)
# An instance that ends so soon after its start has not trained.
SHORT_LIFE = timedelta(minutes=10)
EPOCH = datetime.min.replace(tzinfo=UTC)


def newest_failure(activities: Iterable[Activity], since: datetime) -> str | None:
    """Return AWS's words for the last launch that ended; None if it succeeded or is older."""
    ended = [
        activity
        for activity in _launches(activities)
        if at(activity, "StartTime") >= since and _outcome(activity) in (Phase.RUNNING, Phase.FAILED)
    ]
    newest = max(ended, key=lambda activity: at(activity, "StartTime"), default=None)
    if newest is None or _outcome(newest) is Phase.RUNNING:
        return None
    text = newest.get("StatusMessage") or newest.get("Description") or ""
    status = str(newest.get("StatusCode"))
    return text if status in states.ACTIVITIES else f"{status}: {text}"


# EC2's words for other zones: "You can currently get g5.xlarge capacity by not specifying an Availability Zone in your
# request or choosing us-west-2b, us-west-2c." A local zone's name is longer: us-west-2-lax-1a.
_ZONE = r"[a-z]+(?:-[a-z0-9]+)*-\d[a-z]"
_ZONES_WITH_CAPACITY = re.compile(rf"\bchoosing\s+({_ZONE}(?:(?:\s*,\s*(?:(?:or|and)\s+)?|\s+(?:or|and)\s+){_ZONE})*)")


def zones_with_capacity(failure: str) -> list[str]:
    """Return the zones that EC2 names as those that have capacity now, in its order; often none."""
    found = [zone for listed in _ZONES_WITH_CAPACITY.findall(failure) for zone in re.findall(_ZONE, listed)]
    return list(dict.fromkeys(found))


def launch_line(
    failure: str, types: Sequence[str], where: str = "", number: str = "no", pool: str = DEFAULT_POOL
) -> str:
    """Return the line for a failed launch, from AWS's words and the instance types, if they are known.

    `where` are the zones, `number` the instances that EC2 has there, in words, and `pool` the one whose keys give EC2
    more choice.
    """
    kinds = " or ".join(types) or "instance"
    if types and states.SPOT.search(failure):
        kinds += " on spot"
    error = states.launch_error(failure)
    if error is None:
        return f"EC2 starts no {kinds}: {one_line(failure)}"
    if error is states.QUOTA:
        return f"the account's quota has no room for another {kinds}; {way_out(error, pool)}"
    if error is states.CAPACITY:
        place = f" in {where}" if where else ""
        on_demand = f"; or {way_out(states.LAUNCH_ERRORS['price'], pool)}" if states.SPOT.search(failure) else ""
        return f"EC2 has {number} {kinds}{place} at the moment; {way_out(error, pool)}{on_demand}"
    return f"EC2 starts no {kinds}: {error.means}; {way_out(error, pool)} ({one_line(failure)})"


def way_out(error: LaunchError, pool: str) -> str:
    """Return what ends an error, with the configuration keys of the pool."""
    spot = setting(pool, "spot")
    return error.way_out.format(zones=setting(pool, "zones"), spot=f"--path {spot}" if "." in spot else spot)


def short_lives(activities: Sequence[Activity], now: datetime) -> str:
    """Return the line for instances that a health check ends soon after their start, again and again; or nothing."""
    started = {
        instance_of(activity): at(activity, "StartTime")
        for activity in _launches(activities)
        if _outcome(activity) is Phase.RUNNING
    }
    ends = [
        activity
        for activity in activities
        if str(activity.get("Description")).startswith("Terminating")
        and states.ENDED_BY_CHECK.search(str(activity.get("Cause")))
        and now - at(activity, "StartTime") <= RECENT
        and at(activity, "StartTime") - started.get(instance_of(activity), EPOCH) <= SHORT_LIFE
    ]
    if len(ends) < 2:
        return ""
    newest = max(ends, key=lambda activity: at(activity, "StartTime"))
    cause = re.sub(r"^At \S+ ", "", one_line(newest["Cause"]))
    return (
        f"instances end within {minutes(SHORT_LIFE)} of their start, again and again; aws ec2 get-console-output "
        f"--instance-id {instance_of(newest)} shows the boot ({cause})"
    )


def slow_launch(activities: Iterable[Activity], now: datetime) -> str:
    """Return the line for the launch that has lasted longest, if that is too long; or nothing."""
    slow = [
        each
        for each in _launches(activities)
        if _outcome(each) is Phase.STARTING and now - at(each, "StartTime") >= SLOW
    ]
    if not slow:
        return ""
    oldest = min(slow, key=lambda activity: at(activity, "StartTime"))
    code = str(oldest.get("StatusCode"))
    means = states.ACTIVITIES[code].means if code in states.ACTIVITIES else "Auto Scaling has not ended it"
    message = one_line(oldest.get("StatusMessage") or "")
    return f"an instance has not started within {minutes(SLOW)}: {means} ({code}{f': {message}' if message else ''})"


def in_service_since(activities: Iterable[Activity]) -> dict[str, datetime]:
    """Return since when each instance is in service."""
    started = (each for each in _launches(activities) if _outcome(each) is Phase.RUNNING)
    return {instance_of(activity): at(activity, "EndTime") for activity in started if activity.get("EndTime")}


def instance_of(activity: Activity) -> str:
    """Return the ID of an activity's instance, which its description has; empty without one."""
    words = str(activity.get("Description")).replace(".", " ").replace(",", " ").split()
    return next((word for word in words if word.startswith("i-")), "")


def at(document: Mapping[str, Any], key: str) -> datetime:
    """Return a time of an answer, long ago if it has none."""
    value = document.get(key)
    return value if isinstance(value, datetime) else EPOCH


def without_ids(line: str) -> str:
    """Return a line without the IDs of instances and tasks, by which two lines of one cause differ."""
    return re.sub(r"\b(?=[a-z-]*\d)[0-9a-f-]{8,}\b|\bi-\w+", "", line)


def minutes(span: timedelta) -> str:
    """Return a time in words."""
    return counted(int(span.total_seconds() // 60), "minute")


def _launches(activities: Iterable[Activity]) -> list[Activity]:
    return [each for each in activities if str(each.get("Description")).startswith("Launching")]


def _outcome(activity: Activity) -> Phase:
    """Return what has become of a launch; one with a status that AWS has added has failed once it has ended."""
    state = states.ACTIVITIES.get(str(activity.get("StatusCode")))
    if state is None:
        return Phase.FAILED if activity.get("EndTime") else Phase.STARTING
    if state.phase is not Phase.WITHDRAWN:
        return state.phase
    # Cancelled by a smaller desired capacity, or because EC2 ended the instance at once.
    text = f"{activity.get('StatusMessage')} {activity.get('Description')}"
    has_failed = states.launch_error(text) or "Termination Reason" in text
    return Phase.FAILED if has_failed else Phase.WITHDRAWN
