"""Choice of the node group in which a run trains: the first of its candidates where EC2 has the nodes.

EC2's refusal moves a run without workers at once; otherwise the worker timeout does. Each candidate is tried once in a
wait; then the run goes back to the one that had the most instances, and stays. Its requests in Ray have the labels of
the node group, so the demand moves with it: nothing here changes anything in AWS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ray_on_ecs import pools
from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CPU_POOL, DEFAULT_POOL, SETTINGS
from ray_on_ecs.errors import UsageError, counted
from ray_on_ecs.pools import listed
from ray_on_ecs.run.queue import Place, gpus_by_pool
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.starting.launches import zones_with_capacity
from ray_on_ecs.starting.states import QUOTA, launch_error
from ray_on_ecs.tracking.run_record import Pool

logger = logging.getLogger(__name__)


def candidates(config: RunConfig, info: ClusterInfo) -> list[str]:
    """Return the kinds of node that can hold a run, in the order in which it tries them.

    Those of a run that names neither GPUs nor pools have GPUs, or on CPUs are the default pool's and the CPU workers.
    A Ray program chooses by itself and has none.

    Raises:
        UsageError: The stack has no such pool, or no pool can hold the run.
    """
    if config.driver:
        return []
    groups, kinds = info["groups"], _kinds(config, info)
    without_gpus = [groups[kind]["pool"] for kind in kinds if not groups[kind]["gpu"]]
    if without_gpus and config.device == "cuda":
        raise UsageError(f"--pool: {without_gpus[0]!r} has no GPUs, which --device cuda needs; leave one of them out")
    if without_gpus and len(without_gpus) < len(kinds) and config.device != "cpu":
        raise UsageError(f"--pool: {without_gpus[0]!r} has no GPUs, and others of {config.pool} have; choose one kind")
    kinds = _with_efa(config, kinds, groups)
    fewest = config.workers[0] if config.workers else 0
    fitting = [kind for kind in kinds if _most_workers(config, groups[kind]) >= fewest]
    if kinds and not fitting:
        raise UsageError(
            f"--num-workers: {config.num_workers} are more than a pool of {_named(config) or 'the stack'} can hold; it "
            f"has {pools.describe(info)}; ask for fewer, or raise the pool's maximum"
        )
    return fitting


def _with_efa(config: RunConfig, kinds: list[str], groups: Mapping[str, NodeGroup]) -> list[str]:
    """Return the kinds that have EFA if the run requires it, and all otherwise.

    Raises:
        UsageError: None of them has EFA, or one node holds the run.
    """
    having = [kind for kind in kinds if groups[kind].get("efa")]
    if not config.require_efa:
        return kinds
    if not having:
        named = _named(config)
        problem = f"{named}: none of these pools has EFA" if named else "the stack has no pool with EFA"
        raise UsageError(f"--require-efa: {problem}; choose one by --pool, switch it on (docs/efa.md), or leave it out")
    if config.workers and all(groups[kind]["units"] >= config.workers[1] for kind in having):
        workers, pool = counted(config.workers[1], "worker"), groups[having[0]]["pool"]
        raise UsageError(
            f"--require-efa: one node of pool {pool} holds {workers}, and needs no network; ask for more workers, or "
            "leave it out"
        )
    return having


def _kinds(config: RunConfig, info: ClusterInfo) -> list[str]:
    """Return the kinds that a run may use, whether they have room for its workers or not."""
    kinds = pools.candidates(info, gpus=config.gpu_names, pools=config.pool_names)
    if _named(config) or config.device == "cuda" or (kinds and config.device != "cpu"):
        return kinds
    by_pool, groups = pools.kinds_by_pool(info), info["groups"]
    return [kind for pool in (DEFAULT_POOL, CPU_POOL) for kind in by_pool.get(pool, ()) if groups[kind]["max"]]


def _most_workers(config: RunConfig, group: NodeGroup) -> float:
    """Return the number of workers that a group can hold; infinity for CPUs of instances with GPUs."""
    return float("inf") if group["gpu"] and config.device == "cpu" else group["max"] * group["units"]


def default_workers(config: RunConfig, info: ClusterInfo) -> int | None:
    """Return the number of workers of a run that gives none: a worker for each GPU of its first candidate's nodes.

    Of several pools that the run names, each can hold them.
    """
    if config.device == "cpu":
        return None
    groups = [info["groups"][kind] for kind in candidates(config, info)]
    numbers = [group["default_nodes"] * pools.gpus_of(group) for group in groups]
    return min(numbers if _named(config) else numbers[:1], default=0) or None


def first_need(config: RunConfig, info: ClusterInfo) -> tuple[str, int] | None:
    """Return the kind of node that a run chooses while the cluster has none, and the GPUs or CPUs that it needs there.

    None for a Ray program, a run that no pool can hold, and where prices decide that are not known.
    """
    try:
        kinds = candidates(config, info)
    except UsageError:
        return None  # the head refuses it
    groups = info["groups"]
    uses_gpus = config.device != "cpu" and any(groups[kind]["gpu"] for kind in kinds[:1])
    if not (_named(config) or uses_gpus):
        kinds.sort(key=lambda kind: bool(groups[kind]["gpu"]))  # as `PoolChoice.begin` does
    if not kinds or not _is_ordered(config, kinds, info):
        return None
    group = groups[kinds[0]]
    number = replace(config, num_workers=config.num_workers or default_workers(config, info)).fewest_workers
    needed = number if uses_gpus or not group["gpu"] else 1  # any instance with GPUs has CPUs enough
    return kinds[0], min(needed, group["max"] * group["units"])


def _is_ordered(config: RunConfig, kinds: list[str], info: ClusterInfo) -> bool:
    """Return True if the first pool is known without the prices, by which `kinds_by_pool` orders those of one GPU."""
    first = info["groups"][kinds[0]]
    alike = (info["groups"][kind] for kind in kinds if not config.gpu or info["groups"][kind]["gpu"] == first["gpu"])
    is_only = len({group["pool"] for group in alike}) == 1
    return bool(info["prices"] or config.pool) or first["pool"] in SETTINGS or is_only


class PoolChoice:
    """The node group of a run. A thread may read the attributes while another one changes the choice.

    Args:
        config: The run's settings.
        info: The workers as the stack has them.
        place: The run's place in the queue.
        needed: Returns the number of instances of a kind with which the run has room, and of those that others fill.
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
        needed: Callable[[str, ClusterInfo], tuple[int, int]],
        note: Callable[[Pool], object],
        watch: Callable[..., Shortage] = Shortage,
        latest: Callable[[], ClusterInfo | None] = read_cluster_info,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._place, self._needed, self._note = config, place, needed, note
        self._make_watch, self._latest, self._now = watch, latest, now
        self._kinds = candidates(config, info)
        self._gpu = ""  # to which the run is bound
        self._most: dict[str, int] = {}  # the most instances of each kind that this wait has tried
        self._without_quota: set[str] = set()
        self._is_last = False
        self.info: ClusterInfo = info
        self._seen = info
        self.kind = self._kinds[0]
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
        """Reason why the workers don't start, with the candidates that were tried; empty if nothing is wrong."""
        tried = [self._where(kind) for kind in self._most if kind in self.info["groups"]]
        text = f"tried {listed(tried)}" if len(tried) > 1 else ""
        return "; ".join(filter(None, (self._watch.line, self._zones_to_add(), text)))

    @property
    def is_before_start(self) -> bool:
        """True until the start of the pool's reservation, as EC2 last told it."""
        return self._watch.is_before_start

    def begin(self, has_room: Callable[[str], bool] = lambda kind: False) -> bool:
        """Choose the first node group, of the pool where the run has begun in the queue; False if no queue has room.

        One with free nodes comes first. On CPUs any of the pools will do: CPU workers are left to the preparation of
        data if others are free, and GPUs are started last.
        """
        self._refresh()
        groups, of_place = self.info["groups"], self._place.pool
        is_any = not (_named(self._config) or self.uses_gpus)
        is_free = {kind: has_room(kind) for kind in self._kinds}

        def rank(kind: str) -> tuple[bool, bool]:
            is_elsewhere = groups[kind]["pool"] != of_place
            starts_gpus = not is_free[kind] and bool(groups[kind]["gpu"])
            return (not is_free[kind], starts_gpus) if is_any else (is_elsewhere, not is_free[kind])

        for kind in sorted(self._kinds, key=rank):
            is_other = kind != next(each for each in self._kinds if groups[each]["pool"] == groups[kind]["pool"])
            free = ", where nodes are free" if is_free[kind] and (is_other or is_any) else ""
            if self._go_to(kind, self._first_reason(kind) + free):
                self._name_others()
                return True
        return False

    def wait_anew(self) -> None:
        """Begin another wait, after a loss of workers: each candidate may be tried again, the present one first.

        A run that names neither GPUs nor pools is bound to the GPU on which it has begun.
        """
        self._gpu = "" if _named(self._config) else self.info["groups"][self.kind]["gpu"]
        self._refresh()
        self._kinds = self._alike(self._kinds, self.info)
        self._most, self._without_quota, self._is_last = {self.kind: 0}, set(), False
        self._watch = self._watch_of(self.kind, self._now())

    def look_if_due(self) -> None:
        """Look at EC2 if the last time is a while ago, and move on if it refuses the nodes."""
        self._refresh()
        if self.kind not in self._kinds:
            self._move(f"the stack has no {self._where(self.kind)} for it any more")
            return
        self._watch.look_if_due()
        self._most[self.kind] = max(self._most.get(self.kind, 0), self._watch.most)
        if refusal := self._watch.refusal:
            if launch_error(refusal) is QUOTA:  # it is the pool's in all zones
                self._without_quota |= {*pools.siblings(self.kind, self.info)}
            self._move(self._watch.reason, zones_with_capacity(refusal))

    def move_on(self, seconds: float, *, has_nodes: bool = False) -> bool:
        """Move on after a wait of so long; return False if the run stays.

        A run whose nodes others use comes back to them if no other candidate has nodes.
        """
        self._refresh()
        if has_nodes:
            self._most[self.kind] = self._needed(self.kind, self.info)[0]
        return self._move(f"no room in {self._where(self.kind)} within {seconds:.0f} s")

    def _alike(self, kinds: list[str], info: ClusterInfo) -> list[str]:
        return [kind for kind in kinds if self._gpu in ("", info["groups"][kind]["gpu"])]

    def _refresh(self) -> None:
        """Take a changed stack: pools may have come, or gone."""
        latest = self._latest()
        if not latest or latest == self._seen:
            return
        self._seen = latest
        try:
            kinds = self._alike(candidates(self._config, latest), latest)
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
        return self._go_to(best, f"none of {listed([self._where(kind) for kind in tried])} has enough, and {most}")

    def _go_to(self, kind: str, reason: str) -> bool:
        """Choose a kind, if the queue has room in its pool; return whether it has."""
        group = self.info["groups"][kind]
        if group["pool"] != self._place.pool and not self._place.move(group["pool"], gpus_by_pool(self.info)):
            logger.debug(f"the queue of pool {group['pool']} has no room")
            return False
        self.kind = kind
        self._most.setdefault(kind, 0)
        self._watch = self._watch_of(kind, self._now())
        number = pools.instances_for(self._config.fewest_workers, group, use_gpu=self.uses_gpus)
        types, prices = " or ".join(group["types"]), self.info["prices"] or {}
        known = [prices[each] for each in group["types"] if each in prices]
        usd = f", up to {number * max(known):.2f} USD an hour" if known else ""
        if group.get("reservation", {}).get("is_block"):
            usd = ", paid up front"
        logger.info(f"pool {group['pool']} ({number} x {types} in {_zones(group)}{usd}): {reason}")
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

    def _first_reason(self, kind: str) -> str:
        groups, named = self.info["groups"], _named(self._config)
        names, own = self._pools(self._kinds), groups[kind]["pool"]
        if not (named or groups[kind]["gpu"]) or self._config.device == "cpu":
            return named or "the run is on CPUs"
        if passed := names[: names.index(own)]:
            return f"no room in {listed(passed)} beside the runs before this one"
        of = named or "the stack's pools"
        if self._pools(_kinds(self._config, self.info))[0] != own and self._config.workers:
            return f"first of {of} that can hold {counted(self._config.workers[0], 'worker')}"
        return f"first of {of}" if len(names) > 1 else named or "the stack's pool with GPUs"

    def _name_others(self) -> None:
        """Print the pools that the run names and that can't hold it."""
        named = self._pools(_kinds(self._config, self.info)) if _named(self._config) else []
        if small := [pool for pool in named if pool not in self._pools(self._kinds)]:
            workers = counted(self._config.fewest_workers, "worker")
            logger.info(f"{_named(self._config)}: without {listed(small)}, whose maximum can't hold {workers}")

    def _pools(self, kinds: list[str]) -> list[str]:
        return list(dict.fromkeys(self.info["groups"][kind]["pool"] for kind in kinds))

    def _zones_to_add(self) -> str:
        """Return the hint for zones in which EC2 has capacity, and the stack no node group of the pool."""
        groups = self.info["groups"].values()
        pool = self.info["groups"][self.kind]["pool"]
        known = {zone for group in groups if group["pool"] == pool for zone in group["zones"]}
        others = [zone for zone in zones_with_capacity(self._watch.refusal) if zone not in known]
        if "reservation" in self.info["groups"][self.kind]:  # its zone is fixed
            return ""
        return f"EC2 has capacity in {listed(others)}: add to {pools.setting(pool, 'zones')}" if others else ""

    def _where(self, kind: str) -> str:
        group = self.info["groups"][kind]
        return f"{group['pool']} in {_zones(group)}"


def _named(config: RunConfig) -> str:
    return f"--gpu {config.gpu}" if config.gpu else f"--pool {config.pool}" if config.pool else ""


def _zones(group: NodeGroup) -> str:
    return " or ".join(group["zones"])
