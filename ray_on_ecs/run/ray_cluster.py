"""The Ray cluster that a run is on: join it, and find room for the workers."""

import logging
import math
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.util import placement_group, placement_group_table, remove_placement_group

from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import (
    CLUSTER_INFO_VARIABLE,
    CPU_POOL,
    CPU_WORKERS,
    DEFAULT_POOL,
    INSTANCE_LABELS,
    NODE_GROUP_LABEL,
    WORKERS,
    label_of_pool,
)
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.periodic import run_every
from ray_on_ecs.pools import Condition, Request, gpus_of, kind_of_node, kind_of_request, kinds_by_pool, selector
from ray_on_ecs.run import cluster_token
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
from ray_on_ecs.run.queue import LOCAL, head_address
from ray_on_ecs.run.ray_private import RAY_ERRORS, available_resources_per_node, join_times, print_by
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.signals import stoppable
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.shown_log import ForwardedLines
from ray_on_ecs.tracking.starts import Moments, moments_in

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # a node needs minutes to join
CONNECT_SECONDS = 5.0  # the head is in the same network
# Ray ends a driver, which then prints nothing, when the head has not answered for 60 s.
HEAD_SECONDS, HEAD_POLL_SECONDS = 55.0, 3.0
# The output of the workers, which Ray forwards to this process.
forwarded = ForwardedLines()
WATCH_SECONDS = 20.0  # a look asks AWS


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
        ResourceError: It doesn't answer, or see `head_address`.
        UsageError: It wants another token than `RAY_AUTH_TOKEN`, or any, or see `head_address`.
    """
    address = head_address()
    _check_reachable(address)
    print_by(forwarded.print)
    try:
        # Ray puts the folder in which it is started on the import path of its processes, where a user's queue.py would
        # hide Python's.
        with chdir("/"):
            ray.init(address=address, logging_level=logging.ERROR)
        logger.debug(f"joined the Ray cluster at {address}")
    except AuthenticationError as cause:
        raise UsageError("RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's") from cause
    except ConnectionError as cause:
        raise ResourceError(
            f"RAY_ADDRESS: no Ray cluster answers at {address!r} ({cause}), or RAY_AUTH_TOKEN isn't its token"
        ) from cause


@contextmanager
def ending_without_head(config: RunConfig) -> Generator[None]:
    """End this process with a line once the head is lost; until Ray ends it, the main thread waits in calls of Ray."""
    address = head_address()
    silence = Silence()

    def look() -> None:
        try:
            _connect_to(address)
        except OSError as cause:
            if silence.measure() > HEAD_SECONDS:
                lost = f"the Ray head at {address} is lost ({cause}); continue with --run-name {config.run_name}"
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
) -> WorkerAllocation:
    """Wait until the cluster has room for the run's workers; Ray knows meanwhile what is missing.

    Args:
        config: The run's settings.
        seconds: How long to wait, in each of the node groups that it tries.
        waiting: Entered while it waits, which a run with room at once does not.
        choice: The choice of its node group; None without a stack, and for a run that chooses none.

    Raises:
        ResourceError: The cluster still lacks room after `seconds`.
    """
    allocation = allocate(config, choice)
    if allocation:
        return allocation
    if seconds:
        logger.info(f"waiting up to {seconds:.0f} s for more nodes: {describe_resources(_nodes())}")
    with waiting() if seconds else nullcontext():
        while allocation is None:
            allocation = _wait_in_group(config, seconds, choice)
    return allocation


def _wait_in_group(config: RunConfig, seconds: float, choice: PoolChoice | None) -> WorkerAllocation | None:
    """Wait for room in the chosen node group; return None once another one is chosen."""
    kind = choice and choice.kind
    watch: PoolChoice | Shortage | None = choice
    with _pending_placement_group(config, choice) if seconds else nullcontext():
        deadline = time.monotonic() + seconds
        while True:
            with suppress(*RAY_ERRORS):  # the head may be away for a moment
                if allocation := allocate(config, choice):
                    return allocation
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if choice and choice.move_on(seconds):
                    return None
                raise ResourceError(shortage_message(config, _nodes(), seconds, watch.line if watch else ""))
            watch = watch or shortage_of(_request_of(use_gpu=config.device != "cpu"))
            if watch:
                watch.look_if_due()
            if choice and choice.kind != kind:
                return None
            time.sleep(min(POLL_SECONDS, remaining))


def allocate(config: RunConfig, choice: PoolChoice | None = None) -> WorkerAllocation | None:
    """Allocate the workers on the nodes of the chosen node group, or of those that a run without one may use."""
    if choice:
        return _allocate_on(choice.labels, replace(config, gpu=None, device="cuda" if choice.uses_gpus else "cpu"))
    others = _labels_of_others()
    allocation = _allocate_on(_without(others), config)
    if allocation is None or allocation.use_gpu:  # which no CPU worker has
        return allocation
    # The nodes that prepare data are left to that if the others have room for the workers.
    return _allocate_on(_without([CPU_WORKERS, *others]), config) or allocation


def _allocate_on(labels: Mapping[str, str], config: RunConfig) -> WorkerAllocation | None:
    found = allocate_workers(config, [node["Resources"] for node in selected(labels)])
    return found and replace(found, node_labels=labels)


def _labels_of_others() -> list[str]:
    """Return the labels of the pools that a run uses only if it names them, or if they have GPUs."""
    info = read_cluster_info()
    return [label_of_pool(pool) for pool in kinds_by_pool(info) if pool not in (DEFAULT_POOL, CPU_POOL)] if info else []


def _without(labels: Sequence[str]) -> dict[str, str]:
    """Return the selector of the nodes without one of these labels of a pool."""
    return {NODE_GROUP_LABEL: f"!in({','.join(labels)})"} if labels else {}


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
    try:
        return _free_slots(kind, info, use_gpu) >= (config.workers or (1, 1))[0]
    except RAY_ERRORS:
        return False


def instances_needed(workers: int, kind: str, info: ClusterInfo, *, use_gpu: bool) -> int:
    """Return the number of instances of a kind with which these workers have room: those that others use, and more.

    Without GPUs, one more has room for all. Not more than the maximum, which may be in use.
    """
    group = info["groups"][kind]
    per_node = gpus_of(group) if use_gpu else workers
    try:
        missing, used = workers - _free_slots(kind, info, use_gpu), len(selected(selector(kind, info)))
    except RAY_ERRORS:
        missing, used = workers, 0
    return min(used + math.ceil(max(missing, 0) / (per_node or 1)), group["max"])


def _free_slots(kind: str, info: ClusterInfo, use_gpu: bool) -> int:
    """Return the number of workers for which the nodes of a kind have room beside other jobs."""
    resource, own = "GPU" if use_gpu else "CPU", defaultdict(float)
    for node, bundle in _places():
        own[node] += bundle.get(resource, 0)
    free: dict[str, Resources] = available_resources_per_node()
    names = [node["NodeID"] for node in selected(selector(kind, info))]
    return sum(int(free.get(name, {}).get(resource, 0) + own[name]) for name in names)


@contextmanager
def watching(choice: PoolChoice | None, *, use_gpu: bool) -> Generator[None]:
    """Until the block ends, look at what EC2 has for the workers when this driver's job has waited for some a while.

    Workers that were lost in the middle of a run, as spot instances are, may have no successors in their node group.
    """
    has_waited = False
    watch: PoolChoice | Shortage | None = None

    def look() -> None:
        nonlocal has_waited, watch
        is_waiting = _is_waiting()
        if not is_waiting:
            watch = None
        elif has_waited:  # at two looks: for a moment at its start and at its end, a run does not have workers
            if watch is None and choice:
                choice.wait_anew(datetime.now(UTC) - timedelta(seconds=2 * WATCH_SECONDS))
            watch = watch or choice or shortage_of(_request_of(use_gpu=use_gpu))
            if watch:
                watch.look_if_due()
        has_waited = is_waiting

    if CLUSTER_INFO_VARIABLE not in os.environ:
        yield
        return
    with run_every(WATCH_SECONDS, look, "EC2 capacity"):
        yield


def _is_waiting() -> bool:
    """True if this driver's job has neither a worker nor a place for one; False if Ray does not answer.

    An elastic run doesn't even ask for places before it has room for its fewest workers. A group that lost one of its
    nodes may still run on the others.
    """
    try:
        return all(group["state"] == "PENDING" for group in placement_groups().values())
    except RAY_ERRORS:
        return False


def instances_with_workers() -> Counter[InstanceKind]:
    """Return the instances on which this driver's job has a place, counted by kind; none if Ray doesn't answer."""
    try:
        return instances_of({node for node, _ in _places()})
    except RAY_ERRORS:
        return Counter()


def instances_of(node_ids: Iterable[str]) -> Counter[InstanceKind]:
    """Return the number of these nodes' instances by their kind."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    return Counter(instance_kind(labels.get(node, {})) for node in node_ids)


def instance_kind(labels: Mapping[str, str]) -> InstanceKind:
    """Return the instance type, the market and the kind of a node by its labels."""
    info = read_cluster_info()
    kind = kind_of_node(labels, info) if info else None
    return InstanceKind(
        labels.get(INSTANCE_LABELS["instance_type"]), labels.get(INSTANCE_LABELS["market"]), kind or WORKERS
    )


def moments_of(node_ids: Collection[str]) -> list[Moments]:
    """Return how each of these nodes started, as far as its labels and Ray know it; nothing if Ray does not answer."""
    try:
        labels, joined = {node["NodeID"]: node["Labels"] for node in ray.nodes()}, join_times()
    except (*RAY_ERRORS, AttributeError):  # a private name may be gone, which must not end a run
        return [{} for _ in node_ids]
    return [moments_in({**labels.get(node, {}), "joined": joined.get(node)}) for node in node_ids]


def _places() -> Iterator[tuple[str, Resources]]:
    """Yield the nodes on which this driver's job has places, each with the resources that it holds there."""
    for group in placement_groups().values():
        for index, node in group["bundles_to_node_id"].items():
            if node:
                yield node, group["bundles"][index]


def placement_groups(jobs: Collection[str] | None = None) -> dict[str, Any]:
    """Return Ray's table of the placement groups of these jobs, by default this driver's, without removed groups."""
    suffixes = _suffixes(jobs)
    table: dict[str, Any] = placement_group_table()
    return {key: group for key, group in table.items() if key.endswith(suffixes) and group["state"] != "REMOVED"}


def _suffixes(jobs: Collection[str] | None) -> tuple[str, ...]:
    """Return the ends of the IDs of these jobs' placement groups."""
    return (ray.get_runtime_context().get_job_id(),) if jobs is None else tuple(jobs)


def _check_reachable(address: str) -> None:
    """Check that a Ray cluster at `host:port` answers, and accepts this process: Ray itself would try for ever.

    Raises:
        ResourceError: Nothing listens there, or not a Ray cluster.
        UsageError: The cluster wants another token, or any.
    """
    try:
        _connect_to(address)
    except (OSError, UnicodeError) as cause:  # the latter of a name that can't be a host's
        raise ResourceError(
            f"RAY_ADDRESS: nothing listens at {address!r} ({cause}); correct it, or train on this machine by {LOCAL}"
        ) from cause
    cluster_token.check(address)


def _connect_to(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def _pending_placement_group(config: RunConfig, choice: PoolChoice | None) -> Generator[None]:
    """Request the workers' resources from Ray: the scaling alarms count the requests that wait in Ray.

    A run that gives no number of workers asks for one, because one more node brings all its GPUs. The group holds what
    it gets, so it is removed before the workers' own is requested.
    """
    use_gpu = choice.uses_gpus if choice else config.device != "cpu"
    labels = choice.labels if choice else {} if use_gpu else _without(_labels_of_others())
    bundles = [{"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}] * (config.workers[0] if config.workers else 1)
    group = placement_group(bundles, bundle_label_selector=[labels] * len(bundles) if labels else None)
    try:
        yield
    finally:
        with suppress(*RAY_ERRORS):
            remove_placement_group(group)


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's table of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in alive_nodes()]


def shortage_of(request: Request, workers: int = 1) -> Shortage | None:
    """Return the watch of the node group that the head starts for requests; None without one."""
    info = read_cluster_info()
    kind = kind_of_request(request, info) if info else None
    if info is None or kind is None:
        return None
    use_gpu = bool(request.resources.get("GPU"))
    return Shortage(info, kind, lambda: instances_needed(workers, kind, info, use_gpu=use_gpu), datetime.now(UTC))


def _request_of(*, use_gpu: bool) -> Request:
    """Return the request of a worker of a run without a choice of pools."""
    if use_gpu:
        return Request({"CPU": 1, "GPU": 1})
    others = Condition(NODE_GROUP_LABEL, tuple(_labels_of_others()), is_not=True)
    return Request({"CPU": 1}, (others,))
