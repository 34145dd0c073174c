"""Numbers of workers of one kind: the calls of ECS and Auto Scaling that bring them to the demand.

Kinds of one pool, in several zones, share its maximum (`in_pools`), and one gives way to another (`giving_way`).

Functions without side effects: node/scaling.py asks AWS and makes the calls. They make for the numbers of the scaling
alarms, which do the same minutes later and without a head. So a call that is repeated, lost, refused or made by two
heads does no harm: they set a number, end an instance that nothing needs, or replace a deployment that has failed.

    out     the group's capacity at once, and the service's count as its instances come into service: ECS starts two
            instances for a task that finds none
    in      the service's count only after a run with --then-stop; the idle alarm lowers it otherwise
    empty   an instance that runs no task ends if it is beyond the service's count, or of a type that the pool no longer
            has; and a request for one that EC2 does not have
    failed  a new deployment while programs wait, ten minutes after ECS has given up one: it counts tasks for which
            EC2 has no instance as failed, and then starts none
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import scale_out_stride
from ray_on_ecs.node.demand import Need
from ray_on_ecs.pools import kinds_by_pool
from ray_on_ecs.starting.states import LIFECYCLE, Phase

# Time in service before an instance without a task may end, and of an instance that does not register with ECS.
EMPTY_SECONDS, UNREGISTERED_SECONDS = 120.0, 600.0
# How long this head has seen what it ends: answers of AWS may be a minute old.
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/query-api-troubleshooting.html#eventual-consistency
STALE_SECONDS = 60.0
# Between the end of a failed deployment and the next one: a broken image fails again, on instances that are billed.
REDEPLOY_SECONDS = 600.0

Stage = Literal["coming", "in service", "not counted"]
# ECS's state of a container instance that takes tasks; another one is about to end, or to register.
TAKES_TASKS = "ACTIVE"
# Rollout states of a deployment. In a failed one ECS starts no tasks; during one it may be about to place a task on an
# instance that is empty for a moment. Another state counts as in progress.
COMPLETED, FAILED, IN_PROGRESS = "COMPLETED", "FAILED", "IN_PROGRESS"
# Processes of a group that a person can suspend, and without which it does not follow its desired capacity.
LAUNCH, TERMINATE = "Launch", "Terminate"


@dataclass(frozen=True)
class Member:
    """Instance of an Auto Scaling group, as Auto Scaling describes it."""

    instance_id: str
    state: str = "InService"
    is_protected: bool = True  # ECS's managed scaling ends the protection of an instance that it is about to end
    is_healthy: bool = True
    instance_type: str = ""

    @property
    def stage(self) -> Stage:
        """Its part in the group's desired capacity, to which parked, ending and warmed instances do not belong.

        A state that AWS has added counts as coming: the instance may be billed, and is not ended.
        """
        phase = LIFECYCLE.get(self.state, Phase.STARTING)
        if phase is Phase.STARTING and not self.state.startswith("Warmed:"):
            return "coming"
        return "in service" if phase is Phase.RUNNING else "not counted"


@dataclass(frozen=True)
class Host:
    """Instance as ECS describes it: its tasks, running and pending, and when it registered (Unix time)."""

    tasks: int
    registered_at: float
    status: str = TAKES_TASKS


@dataclass(frozen=True, kw_only=True)
class View:
    """Answers of ECS and Auto Scaling about one kind of worker."""

    count: int  # the service's desired count
    rollout: str = COMPLETED  # rollout state of its deployments: COMPLETED, FAILED or IN_PROGRESS
    failed_at: float = 0.0  # Unix time of a failed deployment's end
    capacity: int  # the group's desired capacity
    least: int = 0  # the group's minimum size
    most: int  # the group's maximum size
    suspended: frozenset[str] = frozenset()  # the group's suspended processes
    members: tuple[Member, ...] = ()  # the group's instances
    hosts: Mapping[str, Host] | None = None  # ECS's description by instance ID; None if it was not asked


@dataclass(frozen=True)
class Memory:
    """Observations of this head: since when each instance has been empty, when it ended some, and an open request."""

    empty_since: Mapping[str, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    open_since: float | None = None  # the group has requested more instances than it has and needs
    redeployed_at: float = -math.inf
    types: Sequence[str] = ()  # of the kind's pool, and since when this head has known them
    types_since: float = math.inf

    def ending(self, instance_ids: Iterable[str], now: float) -> Memory:
        """Return this memory with instances that are about to be ended, also if the answer is lost."""
        return replace(self, ended={**self.ended, **dict.fromkeys(instance_ids, now)})


@dataclass(frozen=True)
class SetCount:
    """Set the service's desired count."""

    number: int


@dataclass(frozen=True)
class SetCapacity:
    """Set the group's desired capacity."""

    number: int


@dataclass(frozen=True)
class End:
    """Terminate an instance, and lower the group's desired capacity by one."""

    instance_id: str


@dataclass(frozen=True)
class Redeploy:
    """Start a new deployment of the service, after which ECS starts tasks again."""


Call = SetCount | SetCapacity | End | Redeploy


def is_short(need: Need, limits: NodeGroup) -> bool:
    """Return True if programs request more than there is, and the stack can start more."""
    return need.requested > need.available and need.available < limits["max"] * limits["units"]


def wanted(need: Need, limits: NodeGroup) -> int:
    """Return the number of workers to scale out to, as the scaling alarm computes it; 0 without demand for more."""
    number = need.in_use
    if is_short(need, limits):
        stride = scale_out_stride(limits["max"])
        number = max(number, limits["min"], -(-_nodes_for(need, limits) // stride) * stride)
    return min(number, limits["max"])


def needed(need: Need, limits: NodeGroup) -> int:
    """Return the number of workers below which none is stopped: the minimum, those in use and those requested."""
    return max(limits["min"], need.in_use, min(_nodes_for(need, limits), limits["max"]))


def left_by(need: Need, limits: NodeGroup, began_at: float, now: float) -> int:
    """Return the number of workers that stay after a run with --then-stop, which began at a time.

    Others' are those that are needed, and those that were idle when it began.
    """
    return max(needed(need, limits), need.in_use + sum(now - idle < began_at for idle in need.idle_seconds))


def in_pools(info: ClusterInfo, needs: Mapping[str, Need]) -> dict[str, NodeGroup]:
    """Return the description of each kind that can have workers, with its share of its pool's maximum.

    Workers in use are granted first, and a minimum as far as it exists: EC2 may lack the rest of it. Then each kind
    gets what it needs, the one with the most workers first, as others would take them from work that waits for more.
    Each of them may have what is left.
    """
    limits = {kind: group for kind, group in info["groups"].items() if kind in needs and group["max"]}
    for pool in kinds_by_pool(info).values():
        kinds = [kind for kind in pool if kind in limits]
        shares = {kind: max(needs[kind].in_use, min(limits[kind]["min"], needs[kind].nodes)) for kind in kinds}
        free = max((limits[kind]["max"] for kind in kinds), default=0) - sum(shares.values())
        for kind in sorted(kinds, key=lambda kind: -needs[kind].nodes):
            more = max(0, min(free, _nodes_for(needs[kind], limits[kind]) - shares[kind]))
            shares[kind] += more
            free -= more
        for kind, share in shares.items():
            limits[kind] = NodeGroup(**{**limits[kind], "max": min(limits[kind]["max"], share + max(0, free))})
    return limits


def as_alarms_see(info: ClusterInfo, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Return the demand for the scaling alarms, which know their own zone of a pool alone: its share of the maximum."""
    seen = dict(needs)
    for kind, each in in_pools(info, needs).items():
        if each["max"] < info["groups"][kind]["max"]:
            seen[kind] = replace(needs[kind], requested=min(needs[kind].requested, each["max"] * each["units"]))
    return seen


def giving_way(needs: Mapping[str, Need], limits: Mapping[str, NodeGroup]) -> set[str]:
    """Return the kinds whose idle workers give way, because programs wait for another kind of their pool."""
    short = {kind for kind, each in limits.items() if is_short(needs[kind], each)}
    return {
        kind
        for kind, each in limits.items()
        if any(limits[other]["pool"] == each["pool"] for other in short if other != kind)
    }


def counted(view: View, memory: Memory) -> list[Member]:
    """Return the instances that the group's capacity includes, without those that this head has just ended."""
    return [
        member for member in view.members if member.stage != "not counted" and member.instance_id not in memory.ended
    ]


def surplus(need: Need, limits: NodeGroup, view: View, memory: Memory) -> int:
    """Return the number of instances beyond those that service, group and programs need."""
    return len(counted(view, memory)) - max(needed(need, limits), view.count, view.least)


def of_former_types(limits: NodeGroup, view: View, memory: Memory) -> set[str]:
    """Return the instances of types that the pool no longer has; its tasks may not fit on them, or share them."""
    types = {"", *limits["types"]}
    return {each.instance_id for each in counted(view, memory) if each.instance_type not in types}


def observe(view: View, memory: Memory, now: float, *, is_open: bool) -> Memory:
    """Return the memory with what a view shows; `is_open` if the group requests more than it has and needs."""
    ended = {key: moment for key, moment in memory.ended.items() if now - moment < 2 * STALE_SECONDS}
    empty = [
        member.instance_id
        for member in counted(view, memory)
        if view.hosts is not None and _is_empty(member, view.hosts.get(member.instance_id))
    ]
    since = {instance_id: memory.empty_since.get(instance_id, now) for instance_id in empty}
    open_since = memory.open_since if memory.open_since is not None else now
    return replace(memory, empty_since=since, ended=ended, open_since=open_since if is_open else None)


def decide(
    need: Need, limits: NodeGroup, view: View, memory: Memory, now: float, left: int | None = None
) -> tuple[list[Call], Memory]:
    """Return the calls to make, and the memory after this look, at this Unix time.

    `left` is the number of workers that a run with --then-stop leaves, if one has just ended, or 0 if they give way.
    """
    most = min(limits["max"], view.most)
    number = min(wanted(need, limits), most)
    # A service's tasks need as many instances, also if a person or an alarm has set its count.
    capacity = min(max(number, view.count), most)
    has = len(counted(view, memory))
    keeps = max(capacity, needed(need, limits), view.least, has)
    memory = observe(view, memory, now, is_open=view.capacity > keeps and not memory.ended)
    if memory.types != limits["types"]:
        memory = replace(memory, types=limits["types"], types_since=now)
    calls: list[Call] = []
    if view.rollout != FAILED:
        if view.capacity < capacity and LAUNCH not in view.suspended:
            calls.append(SetCapacity(capacity))
        in_service = sum(member.stage == "in service" for member in counted(view, memory))
        if view.count < (count := min(number, in_service)):
            calls.append(SetCount(count))
    elif is_short(need, limits) and now - max(view.failed_at, memory.redeployed_at) >= REDEPLOY_SECONDS:
        return [Redeploy()], replace(memory, redeployed_at=now)
    if calls:
        return calls, memory
    if left is not None and (count := max(left, needed(need, limits))) < view.count:
        calls.append(SetCount(count))
    elif view.capacity > keeps and memory.open_since is not None and now - memory.open_since >= STALE_SECONDS:
        calls.append(SetCapacity(keeps))
    else:
        calls += _ends(need, limits, view, memory, now)
    return calls, memory.ending([call.instance_id for call in calls if isinstance(call, End)], now)


def _ends(need: Need, limits: NodeGroup, view: View, memory: Memory, now: float) -> list[End]:
    """Return the ends of instances that nothing needs, or that get no task.

    None while ECS may be about to place a task on one, or another caller is about to end one.
    """
    members = counted(view, memory)
    if view.hosts is None or TERMINATE in view.suspended or view.capacity < len(members):
        return []
    ready = []
    for instance_id, since in memory.empty_since.items():
        host = view.hosts.get(instance_id)
        age = now - (host.registered_at if host else since)
        if now - since >= STALE_SECONDS and age >= (EMPTY_SECONDS if host else UNREGISTERED_SECONDS):
            ready.append(instance_id)
    # Not one that has come since: the group may launch a type that this head does not know yet.
    known = {each for each in ready if (host := view.hosts.get(each)) and host.registered_at < memory.types_since}
    if former := of_former_types(limits, view, memory) & known:
        return [End(instance_id) for instance_id in sorted(former)]
    placed = sum(host.tasks for member in members if (host := view.hosts.get(member.instance_id)))
    if placed < view.count or view.rollout != COMPLETED:
        return []
    return [End(instance_id) for instance_id in sorted(ready)[: max(0, surplus(need, limits, view, memory))]]


def _nodes_for(need: Need, limits: NodeGroup) -> int:
    return -(-need.requested // limits["units"])


def _is_empty(member: Member, host: Host | None) -> bool:
    is_ours = member.stage == "in service" and member.is_protected and member.is_healthy
    return is_ours and (host is None or (host.tasks == 0 and host.status == TAKES_TASKS))
