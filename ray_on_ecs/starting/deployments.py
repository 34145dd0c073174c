"""Deployment of an ECS service that is in progress: ECS does not scale in until it has ended.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-auto-scaling.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_on_ecs.errors import counted, one_line
from ray_on_ecs.starting import states
from ray_on_ecs.starting.launches import EPOCH, at
from ray_on_ecs.starting.states import Phase


@dataclass(frozen=True)
class Deployment:
    """Deployment in progress."""

    since: str | None  # its beginning (ISO 8601), or None if it is not known
    # Tasks of earlier versions that still run. ECS stops idle ones at once, and a protected one when its run has ended.
    old_tasks: int

    def age(self, now: datetime) -> timedelta:
        """Return the time since its beginning, none if that is not known."""
        return now - datetime.fromisoformat(self.since) if self.since else timedelta()

    def __str__(self) -> str:
        """Return what is in progress, and what it waits for."""
        since = f" since {datetime.fromisoformat(self.since):%Y-%m-%d %H:%M} UTC" if self.since else ""
        if not self.old_tasks:
            return f"a deployment is in progress{since}"
        return (
            f"a deployment is in progress{since}: it waits for the runs on {counted(self.old_tasks, 'task')} of the "
            "earlier version, which are protected"
        )


def in_progress(service: Mapping[str, Any]) -> Deployment | None:
    """Return the deployment of a service that is in progress."""
    primary = [each for each in _all(service) if each.get("status") == "PRIMARY"]
    if not primary or states.ROLLOUTS.get(str(primary[0].get("rolloutState"))) is not Phase.STARTING:
        return None
    begun = at(primary[0], "createdAt")
    since = None if begun == EPOCH else begun.astimezone(UTC).isoformat(timespec="seconds")
    return Deployment(since, sum(each.get("runningCount", 0) for each in _all(service) if each is not primary[0]))


def failed(service: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the last deployment of a service if ECS has given it up."""
    for each in _all(service):
        if each.get("status") == "PRIMARY" and states.ROLLOUTS.get(str(each.get("rolloutState"))) is Phase.FAILED:
            return each
    return None


def failure(service: Mapping[str, Any]) -> str | None:
    """Return ECS's reason for giving up the last deployment of a service; None if it has not given it up."""
    if (deployment := failed(service)) is None:
        return None
    return one_line(deployment.get("rolloutStateReason") or "ECS gives no reason").removesuffix(".")


def _all(service: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(service.get("deployments") or ())
