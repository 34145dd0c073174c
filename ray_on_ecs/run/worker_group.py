"""Workers as actors of Ray, and the driver's polls of them.

A worker whose process is lost is started again in its place, while the others stay. If the place itself is lost, as
with its node, the driver gives up the group and makes another one.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from ray_on_ecs.errors import one_line
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.exchange import Silence
from ray_on_ecs.run.group import Directive, GroupError, Place, WorkerRank, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.placing import BEGIN_SECONDS, Placed, Placing
from ray_on_ecs.run.ray_cluster import forwarded
from ray_on_ecs.run.ray_private import RAY_ERRORS
from ray_on_ecs.run.worker import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# How long a worker may keep an answer that has nothing new.
ANSWER_SECONDS = 0.5
# An actor whose node is out of reach for a while answers again; one that does not for so long is lost.
WORKER_LOST_SECONDS = 120.0
# The last answers of a worker by which its clock is compared.
CLOCK_ANSWERS = 200
# Between two looks for more room of an elastic run; a start of more workers costs it some seconds each time.
GROW_SECONDS = 60.0
# How long the last lines of the workers may take.
LINES_SECONDS, LINES_POLL_SECONDS = 5.0, 0.05
# In Ray's message on the end of an actor: what stands before the reason, and advice to those who run Ray.
BEFORE_REASON = re.compile(
    r"The actor died unexpectedly before finishing this task\."
    r"|^\t(?:class_name|actor_id|pid|name|namespace|ip): .*"
    r"|The actor is dead because its worker process has died\. Worker exit type: \w+ Worker exit detail:"
    r"|Node Id: \w+",
    re.MULTILINE,
)
ADVICE = re.compile(
    r"(?:If the process was killed by the kernel OOM killer|\(Worker's Lease ID|Top \d+ memory users"
    r"|To see more information about memory|Refer to the documentation on how).*",
    re.DOTALL | re.IGNORECASE,
)


class Member:
    """The driver's view of one worker."""

    def __init__(self, actor: Any, beginning: Any, mark: str) -> None:
        self.actor = actor
        self.mark = mark  # its last line
        self.beginning: Any = beginning  # the reference of `begin`, until it has returned
        self.version = -1
        self.status = WorkerStatus()
        self.told: Directive | None = None
        self.polls = 0  # that are under way
        self.poll_at = 0.0
        self.silence = Silence()
        self.clocks: deque[float] = deque(maxlen=CLOCK_ANSWERS)


class RayGroup:
    """See Group; `seconds` is how long to wait for the places."""

    def __init__(self, settings: Settings, allocation: WorkerAllocation, seconds: float) -> None:
        self.lost: dict[int, str] = {}
        self.next_poll = 1
        self._settings = settings
        self._placing = Placing(allocation, seconds)
        self._placed: list[Placed] = []
        self._members: dict[int, Member] = {}
        self._under_way: dict[Any, int] = {}
        self._grow_at = 0.0

    @property
    def ranks(self) -> Sequence[WorkerRank]:
        """See Group."""
        return [placed.rank for placed in self._placed]

    @property
    def places(self) -> Sequence[Place]:
        """See Group."""
        return [placed.place for placed in self._placed]

    def poll(self, directive: Directive) -> WorkerStatuses:
        """See Group."""
        try:
            if self._placed:
                return self._poll(directive)
            self._placed = self._placing.poll()
            for placed in self._placed:
                self._begin(placed, placed.actor)
        except RAY_ERRORS as cause:
            raise GroupError(reason_of(cause)) from cause
        self._grow_at = time.monotonic() + GROW_SECONDS
        return {}

    def _begin(self, placed: Placed, actor: Any) -> None:
        mark = forwarded.new_mark()
        begun = actor.begin.remote(self._settings, placed.rank, placed.place, placed.gpus, mark)
        self._members[placed.rank.rank] = Member(actor, begun, mark)

    def _poll(self, directive: Directive) -> WorkerStatuses:
        self._take_begun()
        self._send(directive)
        self._take_answers()
        for rank, member in self._members.items():
            limit = BEGIN_SECONDS if member.beginning is not None else WORKER_LOST_SECONDS
            if rank not in self.lost and member.silence.measure() > limit:
                self._lose(rank, f"its process has not answered for {limit:.0f} s")
        return {rank: member.status for rank, member in self._members.items() if rank not in self.lost}

    def _take_begun(self) -> None:
        waiting = {member.beginning: rank for rank, member in self._members.items() if member.beginning is not None}
        if not waiting:
            return
        are_all = len(waiting) == len(self._members)
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS if are_all else 0)
        for reference in done:
            rank = waiting[reference]
            member = self._members[rank]
            try:
                ray.get(reference)
            except RAY_ERRORS as error:
                self._lose(rank, reason_of(error))
            else:
                member.beginning = None
                member.silence.end()

    def _send(self, directive: Directive) -> None:
        """Poll each worker that is not being polled, or does not know the directive yet."""
        for rank, member in self._members.items():
            if rank in self.lost or member.beginning is not None or time.monotonic() < member.poll_at:
                continue
            if member.polls == 0 or (member.polls == 1 and member.told != directive):
                reference = member.actor.poll.remote(self.next_poll, directive, member.version, ANSWER_SECONDS)
                self._under_way[reference] = rank
                self.next_poll += 1
                member.polls += 1
                member.told = directive

    def _take_answers(self) -> None:
        if not self._under_way:
            time.sleep(POLL_SECONDS)
            return
        done, waiting = ray.wait(list(self._under_way), num_returns=1, timeout=POLL_SECONDS)
        if waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            done += more
        for reference in done:
            rank = self._under_way.pop(reference)
            member = self._members[rank]
            member.polls -= 1
            try:
                version, status = ray.get(reference)
            except ActorUnavailableError as cause:
                logger.debug(f"rank {rank} is out of reach: {one_line(cause)}")
                member.poll_at = time.monotonic() + POLL_SECONDS  # the answer may come at once
            except RAY_ERRORS as cause:
                self._lose(rank, reason_of(cause))
            else:
                member.silence.end()
                member.clocks.append(time.time() - status.clock)  # the quickest answer is nearest to the truth
                if version >= member.version:  # of two answers the older one may arrive last
                    member.version, member.status = version, replace(status, clock=min(member.clocks))

    def _lose(self, rank: int, reason: str) -> None:
        if rank not in self.lost:
            logger.debug(f"rank {rank} is lost: {reason}")
            self.lost[rank] = reason
            with suppress(*RAY_ERRORS):
                ray.kill(self._members[rank].actor)

    def replace_lost(self) -> bool:
        """See Group."""
        if len(self.lost) == len(self._members):
            return False
        try:
            if not all(self._placing.is_kept(self._placed[rank]) for rank in self.lost):
                return False
            self._under_way = {poll: rank for poll, rank in self._under_way.items() if rank not in self.lost}
            for rank in self.lost:
                self._begin(self._placed[rank], self._placing.start(self._placed[rank].bundle))
        except RAY_ERRORS as cause:
            logger.debug(f"lost workers can't be started again: {one_line(cause)}")
            return False
        self.lost = {}
        return True

    def can_grow(self) -> bool:
        """See Group: at most once a minute."""
        if time.monotonic() < self._grow_at:
            return False
        self._grow_at = time.monotonic() + GROW_SECONDS
        try:
            return self._placing.has_room()
        except RAY_ERRORS:
            return False

    def close(self) -> None:
        """See Group: the last lines of workers that have left are on their way."""
        try:
            last = {member.mark for member in self._members.values() if member.status.has_left}
            until = time.monotonic() + LINES_SECONDS
            while not last <= forwarded.arrived and time.monotonic() < until:
                time.sleep(LINES_POLL_SECONDS)
        finally:
            for member in self._members.values():
                with suppress(*RAY_ERRORS):
                    ray.kill(member.actor)
            self._placing.close()


def reason_of(error: Exception) -> str:
    """Return why a worker is lost, without the IDs and the advice of Ray's message."""
    if not isinstance(error, RayActorError):
        return one_line(f"{type(error).__name__}: {error}")
    text = ADVICE.sub("", BEFORE_REASON.sub("", str(error)))
    return f"a process of the run ended ({' '.join(text.split()) or one_line(error)})"
