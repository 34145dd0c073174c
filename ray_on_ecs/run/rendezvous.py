"""Where the workers of a script meet: they exchange their addresses, and tell how their scripts are doing.

A small Ray actor on the driver's node. Every worker tells all it has to say again and again, so an actor that Ray had
to restart knows everything within a second.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from ray_on_ecs.run.group import Member
from ray_on_ecs.tracking.run_state import create_actor

ANSWER_SECONDS = 5.0


class RendezvousActor:
    """Keeps the latest group of workers; Ray runs it as an actor."""

    def __init__(self) -> None:
        self._group = ""
        self._members: dict[int, Member] = {}

    def update(self, group: str, rank: int, member: Member) -> dict[int, Member]:
        """Take what a worker says of itself; return all that is known of its group, by rank."""
        if group != self._group:
            self._group, self._members = group, {}
        self._members[rank] = member
        return self._members


class Rendezvous:
    """The actor's method. It does not fail when the actor is gone."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def update(self, group: str, rank: int, member: Member) -> dict[int, Member]:
        """Tell what a worker says of itself; return what is known of its group, or nothing if the actor is gone."""
        try:
            return ray.get(self._actor.update.remote(group, rank, member), timeout=ANSWER_SECONDS)
        except RayError:
            return {}


def create_rendezvous() -> Rendezvous:
    """Create the actor."""
    return Rendezvous(create_actor(RendezvousActor))
