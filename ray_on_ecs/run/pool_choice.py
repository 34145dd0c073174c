"""Choice of the node group in which a run trains: the first of its candidates where EC2 has the nodes.

EC2's refusal moves a run that has no workers to the next candidate at once, and else the worker timeout. Each candidate
is tried once in a wait; then the run goes back to the one that had the most instances, and stays. Its requests in Ray
have the labels of the node group, so the demand moves with it: nothing here changes anything in AWS.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from ray_on_ecs import pools
from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import DEFAULT_POOL
from ray_on_ecs.errors import UsageError, counted
from ray_on_ecs.run.queue import gpus_by_pool
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.starting.launches import launch_line, zones_with_capacity
from ray_on_ecs.starting.states import QUOTA, launch_error
from ray_on_ecs.tracking.run_record import Pool

logger = logging.getLogger(__name__)


class Place(Protocol):
    """A run's place in the queue."""

    @property
    def pool(self) -> str:
        """The pool in which it has begun."""

    def move(self, pool: str, gpus: Mapping[str, int]) -> bool:
        """Move to a pool if that has room; return whether it has."""


def candidates(config: RunConfig, info: ClusterInfo) -> list[str]:
    """Return the kinds of node that can hold a run, in the order in which it tries them.

    None for a Ray program, which chooses itself, and for a run on CPUs without a pool, which takes turns with others
    on the default pool's nodes and the CPU workers.

    Raises:
        UsageError: The stack lacks such a pool, or none of them can hold the run.
    """
    if config.driver or (config.device == "cpu" and not config.pool_names):
        return []
    kinds = pools.candidates(info, gpus=config.gpu_names, pools=config.pool_names)
    groups = info["groups"]
    without_gpus = [groups[kind]["pool"] for kind in kinds if not groups[kind]["gpu"]]
    if without_gpus and config.device == "cuda":
        raise UsageError(f"--pool: {without_gpus[0]!r} has no GPUs, which --device cuda needs; leave one of them out")
    if without_gpus and len(without_gpus) < len(kinds) and config.device != "cpu":
        raise UsageError(f"--pool: {without_gpus[0]!r} has no GPUs, and others of {config.pool} have; choose one sort")
    if not config.workers or config.device == "cpu":
        return kinds
    fewest = config.workers[0]
    fitting = [kind for kind in kinds if groups[kind]["max"] * groups[kind]["units"] >= fewest]
    if kinds and not fitting:
        raise UsageError(
            f"--num-workers: {config.num_workers} are more than a pool of {_named(config) or 'the stack'} can hold; it "
            f"has {pools.describe(info)}; ask for fewer, or raise the pool's maximum"
        )
    return fitting


def default_workers(config: RunConfig, info: ClusterInfo) -> int | None:
    """Return the number of workers of a run that gives none: a worker for each GPU of its first candidate's nodes."""
    kinds = candidates(config, info)
    group = info["groups"][kinds[0]] if kinds else None
    return group["default_nodes"] * pools.gpus_of(group) or None if group else None


class PoolChoice:
    """The node group of a run. A thread may look while another one reads the attributes.

    Args:
        config: The run's settings.
        info: The workers as the stack has them.
        place: The run's place in the queue.
        needed: Returns the number of instances of a kind with which the run has room.
        note: Called with each choice.
        watch: Makes the watch of a kind.
        latest: Returns the workers as the stack has them now; None if that is not known.
        now: Returns the time.

    Attributes:
        kind: The kind of node that is chosen.
        info: The workers as the stack has them.
    """

    def __init__(
        self,
        config: RunConfig,
        info: ClusterInfo,
        place: Place,
        needed: Callable[[str, ClusterInfo], int],
        note: Callable[[Pool], object],
        watch: Callable[..., Shortage] = Shortage,
        latest: Callable[[], ClusterInfo | None] = read_cluster_info,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._place, self._needed, self._note = config, place, needed, note
        self._make_watch, self._latest, self._now = watch, latest, now
        self._lock = threading.Lock()
        self._kinds = candidates(config, info)
        self._most: dict[str, int] = {}  # the most instances of each kind that this wait has tried
        self._without_quota: set[str] = set()
        self._is_last = False
        self.info: ClusterInfo = info
        self._seen = info
        of_place = [kind for kind in self._kinds if info["groups"][kind]["pool"] == place.pool]
        self.kind = (of_place or self._kinds)[0]
        self._watch = self._watch_of(self.kind, self._now())

    @property
    def labels(self) -> dict[str, str]:
        """The label selector of the workers' nodes."""
        return pools.selector(self.kind, self.info)

    @property
    def uses_gpus(self) -> bool:
        """True if the workers use the GPUs of the nodes."""
        return bool(self.info["groups"][self.kind]["gpu"]) and self._config.device != "cpu"

    @property
    def line(self) -> str:
        """Why the workers don't start, with the candidates that were tried; empty if nothing is known to be wrong."""
        tried = [self._where(kind) for kind in self._most if kind in self.info["groups"]]
        listed = f"tried {_listed(tried)}" if len(tried) > 1 else ""
        return "; ".join(filter(None, (self._watch.line, self._zones_to_add(), listed)))

    def begin(self, has_room: Callable[[str], bool] = lambda kind: False) -> None:
        """Choose the first node group, which is the one of its pool that has room now, if there is one."""
        own = self.info["groups"][self.kind]["pool"]
        here = [kind for kind in self._kinds if self.info["groups"][kind]["pool"] == own]
        free = next(filter(has_room, here), here[0])
        self._go_to(free, self._first_reason() + (", where nodes are free" if free != here[0] else ""))

    def wait_anew(self, since: datetime) -> None:
        """Begin another wait, after a loss of workers: each candidate may be tried again, the present one first."""
        with self._lock:
            self._most, self._without_quota, self._is_last = {self.kind: 0}, set(), False
            self._watch = self._watch_of(self.kind, since)

    def look_if_due(self) -> None:
        """Look at EC2 if the last time is a while ago, and move on if it refuses the nodes."""
        with self._lock:
            self._refresh()
            if self.kind not in self._kinds:
                self._move(f"the stack has no {self._where(self.kind)} for it any more")
                return
            self._watch.look_if_due()
            self._most[self.kind] = max(self._most.get(self.kind, 0), self._watch.most)
            if refusal := self._watch.refusal:
                if launch_error(refusal) is QUOTA:  # it is the pool's in all zones
                    self._without_quota |= {*pools.siblings(self.kind, self.info)}
                group = self.info["groups"][self.kind]
                reason = launch_line(refusal, group["types"], _zones(group)).partition(";")[0]
                self._move(reason, zones_with_capacity(refusal))

    def move_on(self, seconds: float) -> bool:
        """Move on after a wait of so long; return False if the run stays."""
        with self._lock:
            self._refresh()
            return self._move(f"no room in {self._where(self.kind)} within {seconds:.0f} s")

    def _refresh(self) -> None:
        """Take a changed stack: pools may have come, or gone."""
        latest = self._latest()
        if not latest or latest == self._seen:
            return
        self._seen = latest
        try:
            kinds = candidates(self._config, latest)
        except UsageError as cause:
            logger.debug(f"the stack has changed: {cause}")
            return
        if kinds:
            groups = {self.kind: self.info["groups"][self.kind], **latest["groups"]}  # until the run has left it
            changed: Any = {**latest, "groups": groups}
            self.info, self._kinds = changed, kinds
            self._watch = self._watch_of(self.kind, self._since)

    def _move(self, reason: str, zones: list[str] | None = None) -> bool:
        """Move to the next candidate with room, those in these zones of the pool first; return False if it stays."""
        groups, here = self.info["groups"], self.kind
        left = [kind for kind in self._kinds if kind not in self._most and kind not in self._without_quota]
        own, named = groups[here]["pool"], {*(zones or ())}
        left.sort(key=lambda kind: groups[kind]["pool"] != own or named.isdisjoint(groups[kind]["zones"]))
        for kind in left:
            if self._go_to(kind, reason):
                self._is_last = False
                return True
        if left or self._is_last:
            return False
        tried = [kind for kind in self._kinds if kind in self._most]
        best = max(tried, key=lambda kind: (self._most[kind], kind == here), default=here)
        self._is_last = True
        if best == here:
            return False
        most = f"it had the most, {counted(self._most[best], 'instance')}"
        return self._go_to(best, f"none of {_listed([self._where(kind) for kind in tried])} has enough, and {most}")

    def _go_to(self, kind: str, reason: str) -> bool:
        """Choose a kind, if the queue has room in its pool; return whether it has."""
        group = self.info["groups"][kind]
        if group["pool"] != self._place.pool and not self._place.move(group["pool"], gpus_by_pool(self.info)):
            logger.debug(f"the queue of pool {group['pool']} has no room")
            return False
        self.kind = kind
        self._most.setdefault(kind, 0)
        self._watch = self._watch_of(kind, self._now())
        number = math.ceil((self._config.workers or (1, 1))[0] / group["units"]) if self.uses_gpus else 1
        types = " or ".join(group["types"]) or "node"
        logger.info(f"pool {group['pool']} ({number} x {types} in {_zones(group)}): {reason}")
        self._note(
            {
                "name": group["pool"],
                "zone": ", ".join(group["zones"]),
                "instance_types": [*group["types"]],
                "gpu": group["gpu"],
                "reason": reason,
            }
        )
        return True

    def _watch_of(self, kind: str, since: datetime) -> Shortage:
        self._since = since
        return self._make_watch(self.info, kind, lambda: self._needed(kind, self.info), since)

    def _first_reason(self) -> str:
        groups, named = self.info["groups"], _named(self._config)
        names = list(dict.fromkeys(groups[kind]["pool"] for kind in self._kinds))
        own = groups[self.kind]["pool"]
        if passed := names[: names.index(own)]:
            return f"no room in {_listed(passed)} beside the runs before this one"
        every = pools.candidates(self.info, gpus=self._config.gpu_names, pools=self._config.pool_names)
        of = named or "the stack's pools"
        if groups[every[0]]["pool"] != own and self._config.workers:
            return f"first of {of} that can hold {counted(self._config.workers[0], 'worker')}"
        return f"first of {of}" if len(names) > 1 else named or "the stack's pool with GPUs"

    def _zones_to_add(self) -> str:
        """Return the hint for zones in which EC2 has capacity, and the stack no node group of the pool."""
        groups = self.info["groups"].values()
        pool = self.info["groups"][self.kind]["pool"]
        known = {zone for group in groups if group["pool"] == pool for zone in group["zones"]}
        others = [zone for zone in zones_with_capacity(self._watch.refusal) if zone not in known]
        key = "availabilityZones (or subnetIds)" if pool == DEFAULT_POOL else f"workerPools.{pool}.zones"
        return f"EC2 has capacity in {_listed(others)}: add to {key}" if others else ""

    def _where(self, kind: str) -> str:
        group = self.info["groups"][kind]
        return f"{group['pool']} in {_zones(group)}"


def _named(config: RunConfig) -> str:
    return f"--gpu {config.gpu}" if config.gpu else f"--pool {config.pool}" if config.pool else ""


def _zones(group: NodeGroup) -> str:
    return " or ".join(group["zones"])


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
