"""The Ray cluster that a run is on: join it, and find room for the workers."""

import logging
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE, INSTANCE_LABELS, NODE_GROUP_LABEL, WORKERS
from ray_on_ecs.errors import ResourceError, UsageError, resume_line
from ray_on_ecs.node import api
from ray_on_ecs.periodic import run_every
from ray_on_ecs.pools import instances_for, kind_of_node, selector
from ray_on_ecs.run.allocation import (
    Resources,
    WorkerAllocation,
    allocate_workers,
    describe_resources,
    shortage_message,
    workers_per_node,
)
from ray_on_ecs.run.exchange import Silence
from ray_on_ecs.run.pool_choice import PoolChoice
from ray_on_ecs.run.ray_private import RAY_ERRORS, available_resources_per_node, join_times, print_by
from ray_on_ecs.signals import stoppable
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.shown_log import ForwardedLines
from ray_on_ecs.tracking.starts import Moments, moments_in

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # a node needs minutes to join
PLACED_SECONDS = 2.0  # another run may have taken the room
CONNECT_SECONDS = 5.0  # the head is in the same network
# A GCS may answer late, for instance just after its head has restarted.
BUSY_SECONDS, BUSY_POLL_SECONDS = 30.0, 1.0
WRONG_TOKEN = "RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's"
# Ray ends a driver, which then prints nothing, when the head has not answered for 60 s.
HEAD_SECONDS, HEAD_POLL_SECONDS = 55.0, 3.0
# The output of the workers, which Ray forwards to this process.
forwarded = ForwardedLines()


@contextmanager
def connected() -> Generator[None]:
    """Be on the cluster until the block ends; raise as `connect` does."""
    try:
        connect()
        with stoppable():  # replaces the handlers that ray.init has set
            yield
    finally:
        ray.shutdown()


def connect() -> None:
    """Join the cluster of `RAY_ADDRESS`.

    Raises:
        ResourceError: It doesn't answer.
        UsageError: It wants another token than `RAY_AUTH_TOKEN`, or any.
    """
    address = os.environ["RAY_ADDRESS"]
    _check_reachable(address)
    print_by(forwarded.print)
    try:
        # Ray puts the folder in which it is started on the import path of its processes, where a user's queue.py would
        # hide Python's.
        with chdir("/"):
            ray.init(address=address, logging_level=logging.ERROR)
        logger.debug(f"joined the Ray cluster at {address}")
    except AuthenticationError as cause:
        raise UsageError(WRONG_TOKEN) from cause
    except ConnectionError as cause:
        raise ResourceError(
            f"RAY_ADDRESS: no Ray cluster answers at {address!r} ({cause}), or RAY_AUTH_TOKEN isn't its token"
        ) from cause


@contextmanager
def ending_without_head(config: RunConfig) -> Generator[None]:
    """End this process with a line once the head is lost; until Ray ends it, the main thread waits in calls of Ray."""
    address = os.environ["RAY_ADDRESS"]
    silence = Silence()

    def look() -> None:
        try:
            _connect_to(address)
        except OSError as cause:
            if silence.measure() > HEAD_SECONDS:
                lost = f"the Ray head at {address} is lost ({cause}); {resume_line(config.run_name)}"
                logger.error(lost)
                os._exit(ResourceError.exit_status)
        else:
            silence.end()

    with run_every(HEAD_POLL_SECONDS, look, "head"):
        yield


def describe_nodes() -> str:
    """Return the cluster's nodes, CPUs and GPUs in words."""
    try:
        return describe_resources(_nodes())
    except RAY_ERRORS:
        return "the head does not answer"


def is_one_node() -> bool:
    """Return whether the cluster is a single node, such as a laptop."""
    return len(_nodes()) == 1


def wait_for_workers(
    config: RunConfig,
    seconds: float,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    choice: PoolChoice | None = None,
    before: WorkerAllocation | None = None,
) -> WorkerAllocation:
    """Wait until the cluster has room for the run's workers; Ray knows meanwhile what is missing.

    Args:
        config: The run's settings.
        seconds: How long to wait, in each of the node groups that it tries; from its start in a reservation.
        waiting: Entered while it waits, which a run with room at once does not.
        choice: The choice of its node group; None without a stack.
        before: The workers before a loss, which stay the same on nodes with the same labels.

    Raises:
        ResourceError: The cluster still lacks room after `seconds`.
    """
    allocation = allocate(config, choice, before)
    if allocation:
        return allocation
    if seconds:
        logger.info(f"waiting up to {seconds:.0f} s for more nodes: {describe_nodes()}")
    with waiting() if seconds else nullcontext():
        while allocation is None:
            allocation = _wait_in_group(config, seconds, choice, before) or allocate(config, choice, before)
    return allocation


def _wait_in_group(
    config: RunConfig, seconds: float, choice: PoolChoice | None, before: WorkerAllocation | None
) -> WorkerAllocation | None:
    """Wait for room in the chosen node group; return None once others are to be requested."""
    labels = choice and choice.labels
    with _pending_placement_group(config, choice) if seconds else nullcontext() as group:
        deadline = time.monotonic() + seconds
        while True:
            if allocation := allocate(config, choice, before):
                if group:
                    _wait_until_placed(group)
                return allocation
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if choice and choice.move_on(seconds):
                    return None
                raise ResourceError(shortage_message(config, _nodes(), seconds, choice.line if choice else ""))
            if choice:
                choice.look_if_due()
                if choice.labels != labels:
                    return None
                if choice.is_before_start:
                    deadline = time.monotonic() + seconds
            time.sleep(min(POLL_SECONDS, remaining))


def allocate(
    config: RunConfig, choice: PoolChoice | None = None, before: WorkerAllocation | None = None
) -> WorkerAllocation | None:
    """Allocate the workers on the nodes that the run may use; None if these lack room, or if Ray does not answer."""
    try:
        labels = choice.labels if choice else _labels_without_choice()
        if before and before.node_labels == labels:
            return before if has_nodes(before) else None
        if choice:
            config = replace(config, gpu=None, device="cuda" if choice.uses_gpus else "cpu")
        found = allocate_workers(config, [node["Resources"] for node in selected(labels)])
    except RAY_ERRORS:  # the head may be away for a moment
        return None
    return found and replace(found, node_labels=labels)


def _labels_without_choice() -> dict[str, str]:
    """Return the selector of a run without a choice: in a stack whose pools can't be read it uses the default pool."""
    if CLUSTER_INFO_VARIABLE not in os.environ:
        return {}
    labels = {node["Labels"].get(NODE_GROUP_LABEL) for node in alive_nodes()} - {None, ""}
    return {NODE_GROUP_LABEL: f"!in({','.join(sorted(labels))})"} if labels else {}


def selected(selector: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return Ray's table of the nodes that are alive and that a label selector of this project selects."""

    def holds(value: str | None, wanted: str) -> bool:
        listed = wanted.removeprefix("!in(").removesuffix(")").split(",")
        return value not in listed if wanted.startswith("!in(") else value == wanted

    nodes = alive_nodes()
    return [node for node in nodes if all(holds(node["Labels"].get(key), wanted) for key, wanted in selector.items())]


def has_nodes(allocation: WorkerAllocation) -> bool:
    """Return whether the run's nodes have room for the fewest workers, in use or not; False if Ray does not answer."""
    try:
        nodes = [node["Resources"] for node in selected(allocation.node_labels)]
    except RAY_ERRORS:
        return False
    room = (workers_per_node(node, allocation.cpus_per_worker, allocation.use_gpu) for node in nodes)
    return sum(room) >= allocation.fewest


def has_free_room(config: RunConfig, kind: str, info: ClusterInfo, *, use_gpu: bool) -> bool:
    """Return whether the nodes of a kind have room now for the fewest workers; False if Ray does not answer."""
    return sum(_free_slots(kind, info, use_gpu)) >= config.fewest_workers


def instances_needed(workers: int, kind: str, info: ClusterInfo, *, use_gpu: bool) -> tuple[int, int]:
    """Return the number of instances of a kind with which these workers have room, and of those that others fill.

    The first has those that others use, too. It is not more than the maximum, which may be in use.
    """
    group, slots = info["groups"][kind], _free_slots(kind, info, use_gpu)
    missing = max(workers - sum(slots), 0)
    return min(len(slots) + instances_for(missing, group, use_gpu=use_gpu), group["max"]), slots.count(0)


def _free_slots(kind: str, info: ClusterInfo, use_gpu: bool) -> list[int]:
    """Return the number of workers for which each node of a kind has room; none if Ray does not answer."""
    resource, own = "GPU" if use_gpu else "CPU", defaultdict(float)
    try:
        for node, bundle in places():
            own[node] += bundle.get(resource, 0)
        free: dict[str, Resources] = available_resources_per_node()
        names = [node["NodeID"] for node in selected(selector(kind, info))]
    except RAY_ERRORS:
        return []
    return [int(free.get(name, {}).get(resource, 0) + own[name]) for name in names]


def instances_with_workers() -> Counter[InstanceKind]:
    """Return the instances on which this driver's job has a place, counted by kind; none if Ray doesn't answer."""
    try:
        return instances_of({node for node, _ in places()})
    except RAY_ERRORS:
        return Counter()


def instances_of(node_ids: Iterable[str]) -> Counter[InstanceKind]:
    """Return the number of these nodes' instances by their kind."""
    labels = _labels()
    return Counter(instance_kind(labels.get(node, {})) for node in node_ids)


def instance_kind(labels: Mapping[str, str]) -> InstanceKind:
    """Return the instance type, the market and the kind of a node by its labels."""
    info = read_cluster_info()
    kind = kind_of_node(labels, info) if info else None
    return InstanceKind(
        labels.get(INSTANCE_LABELS["instance_type"]), labels.get(INSTANCE_LABELS["market"]), kind or WORKERS
    )


def types_of(node_ids: Collection[str]) -> list[str]:
    """Return the instance types of these nodes, as far as their labels are known."""
    try:
        labels = _labels()
    except RAY_ERRORS:
        return []
    return sorted({labels.get(node, {}).get(INSTANCE_LABELS["instance_type"], "") for node in node_ids} - {""})


def moments_of(node_ids: Collection[str]) -> list[Moments]:
    """Return how each of these nodes started, as far as its labels and Ray know it; nothing if Ray does not answer."""
    try:
        labels, joined = _labels(), join_times()
    except (*RAY_ERRORS, AttributeError):  # a private name may be gone, which must not end a run
        return [{} for _ in node_ids]
    return [moments_in({**labels.get(node, {}), "joined": joined.get(node)}) for node in node_ids]


def _labels() -> dict[str, Mapping[str, str]]:
    """Return the labels of all nodes that Ray knows."""
    return {node["NodeID"]: node["Labels"] for node in ray.nodes()}


def places(jobs: Collection[str] | None = None) -> Iterator[tuple[str, Resources]]:
    """Yield the nodes on which these jobs have places, by default this driver's, each with what it holds there."""
    for group in placement_groups(jobs).values():
        for index, node in group["bundles_to_node_id"].items():
            if node:
                yield node, group["bundles"][index]


def placement_groups(jobs: Collection[str] | None = None) -> dict[str, Any]:
    """Return Ray's table of the placement groups of these jobs, by default this driver's, without removed groups."""
    suffixes = (ray.get_runtime_context().get_job_id(),) if jobs is None else tuple(jobs)  # of the groups' IDs
    table: dict[str, Any] = placement_group_table()
    return {key: group for key, group in table.items() if key.endswith(suffixes) and group["state"] != "REMOVED"}


def _check_reachable(address: str) -> None:
    """Raise unless a Ray cluster at `host:port` answers, as `connect` does: Ray itself would try for ever."""
    try:
        _connect_to(address)
        _check_gcs(address)
    except api.TokenError as cause:
        raise UsageError(WRONG_TOKEN) from cause
    except (OSError, ValueError) as cause:  # the latter of text that can't be an address
        reason = getattr(cause, "reason", cause)
        line = f"RAY_ADDRESS: no Ray cluster answers at {address!r} ({reason})"
        raise ResourceError(f"{line}; correct it, or train on this machine by ray-on-ecs run --local") from cause


def _check_gcs(address: str) -> None:
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            api.check_gcs(address, BUSY_SECONDS)
            return
        except api.AnswerError as cause:
            if not cause.is_passing or time.monotonic() > until:
                raise
        time.sleep(BUSY_POLL_SECONDS)


def _connect_to(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def _pending_placement_group(config: RunConfig, choice: PoolChoice | None) -> Generator[PlacementGroup]:
    """Request the workers' resources from Ray: the scaling alarms count the requests that wait in Ray.

    A run that gives no number of workers asks for one, because one more node brings all its GPUs. The group holds what
    it gets, so it is removed before the workers' own is requested.
    """
    use_gpu = choice.uses_gpus if choice else config.device != "cpu"
    labels = choice.labels if choice else _labels_without_choice()
    bundles = [{"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}] * config.fewest_workers
    group = placement_group(bundles, bundle_label_selector=[labels] * len(bundles) if labels else None)
    try:
        yield group
    finally:
        with suppress(*RAY_ERRORS):
            remove_placement_group(group)


def _wait_until_placed(group: PlacementGroup) -> None:
    """Wait a moment until a group has its places, for which there is room.

    Ray 2.60 keeps the resources of a group for ever if the group is removed between the two steps of its placement,
    prepare and commit: `GcsPlacementGroupScheduler::CommitAllBundles` returns committed resources alone. A group whose
    nodes join just while it is given up can still lose them; a node that is replaced has them again.
    """
    deadline = time.monotonic() + PLACED_SECONDS
    with suppress(*RAY_ERRORS):
        while not has_places(group) and time.monotonic() < deadline:
            time.sleep(0.05)


def has_places(group: PlacementGroup) -> bool:
    """Return whether a placement group has its places.

    `PlacementGroup.wait` takes whole seconds and leaves something on the head each time; `ready` starts a process.
    """
    table: dict[str, Any] = placement_group_table(group)  # empty if the head does not answer
    return table.get("state") == "CREATED"


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's table of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in alive_nodes()]
