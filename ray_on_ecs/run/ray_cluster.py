"""The Ray cluster that a run is on: join it, and find room for the workers."""

import logging
import math
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

from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE, CPU_WORKERS, INSTANCE_LABELS, NODE_GROUP_LABEL
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.periodic import run_every
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
from ray_on_ecs.run.queue import LOCAL, head_address
from ray_on_ecs.run.ray_private import RAY_ERRORS, available_resources_per_node, join_times, print_by
from ray_on_ecs.run.zone_failover import ZoneFailover
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
SMALLEST_SHARE = 1e-4  # of a CPU or GPU, that Ray counts


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
    config: RunConfig, seconds: float, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> WorkerAllocation:
    """Wait until the cluster has room for the run's workers; Ray knows meanwhile what is missing.

    Args:
        config: The run's settings.
        seconds: How long to wait.
        waiting: Entered while it waits, which a run with room at once does not.

    Raises:
        ResourceError: The cluster still lacks room after `seconds`.
    """
    allocation = _find_room(config, seconds, waiting)
    if allocation.use_gpu:  # which no CPU worker has
        return allocation
    # The nodes that prepare data are left to that if the others have room for the workers.
    others = [node["Resources"] for node in alive_nodes() if node["Labels"].get(NODE_GROUP_LABEL) != CPU_WORKERS]
    allocation_on_others = allocate_workers(config, others)
    return replace(allocation_on_others, leaves_cpu_workers=True) if allocation_on_others else allocation


def _find_room(
    config: RunConfig, seconds: float, waiting: Callable[[], AbstractContextManager[None]]
) -> WorkerAllocation:
    nodes = _nodes()
    allocation = allocate_workers(config, nodes)
    if allocation:
        return allocation
    if not seconds:
        raise ResourceError(shortage_message(config, nodes, seconds))
    logger.info(f"waiting up to {seconds:.0f} s for more nodes: {describe_resources(nodes)}")
    with waiting(), _pending_placement_group(config):
        failover: ZoneFailover | None = None
        deadline = time.monotonic() + seconds
        while True:
            with suppress(*RAY_ERRORS):  # the head may be away for a moment
                nodes = _nodes()
            allocation = allocate_workers(config, nodes)
            if allocation:
                return allocation
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ResourceError(shortage_message(config, nodes, seconds, failover.shortage if failover else ""))
            failover = failover or failover_of(config.workers[0] if config.workers else 1, config.device != "cpu")
            if failover:
                failover.look_if_due()  # before the sleep: the nodes that it may move away don't suffice
            time.sleep(min(POLL_SECONDS, remaining))


def has_nodes(allocation: WorkerAllocation) -> bool:
    """Return whether the cluster has room for the fewest workers, in use or not; False if Ray does not answer."""
    try:
        nodes = [
            node["Resources"]
            for node in alive_nodes()
            if not (allocation.leaves_cpu_workers and node["Labels"].get(NODE_GROUP_LABEL) == CPU_WORKERS)
        ]
    except RAY_ERRORS:
        return False
    room = (workers_per_node(node, allocation.cpus_per_worker, allocation.use_gpu) for node in nodes)
    return sum(room) >= allocation.fewest


@contextmanager
def zone_failover(allocation: WorkerAllocation) -> Generator[None]:
    """Until the block ends, look at what EC2 has for the workers when this driver's job has waited for some a while.

    Workers that were lost in the middle of a run, as spot instances are, may have no successors in their zone.
    """
    has_waited = False
    watch: ZoneFailover | None = None

    def look() -> None:
        nonlocal has_waited, watch
        is_waiting = _is_waiting()
        if not is_waiting:
            watch = None  # the next wait may try each zone again
        elif has_waited:  # at two looks: for a moment at its start and at its end, a run does not have workers
            watch = watch or failover_of(allocation.fewest, allocation.use_gpu)
            if watch:
                watch.look_if_due()
        has_waited = is_waiting

    if CLUSTER_INFO_VARIABLE not in os.environ:
        yield
        return
    with run_every(WATCH_SECONDS, look, "zone failover"):
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
    """Return the instance type and market of a node by its labels."""
    return InstanceKind(labels.get(INSTANCE_LABELS["instance_type"]), labels.get(INSTANCE_LABELS["market"]))


def moments_of(node_ids: Collection[str]) -> list[Moments]:
    """Return how each of these nodes started, as far as its labels and Ray know it; nothing if Ray does not answer."""
    try:
        labels, joined = {node["NodeID"]: node["Labels"] for node in ray.nodes()}, join_times()
    except (*RAY_ERRORS, AttributeError):  # a private name may be gone, which must not end a run
        return [{} for _ in node_ids]
    return [moments_in({**labels.get(node, {}), "joined": joined.get(node)}) for node in node_ids]


def other_jobs_wait(own: Collection[str] | None = None) -> bool:
    """Return whether another job than these, by default this driver's, waits for a placement group with GPUs."""
    suffixes = _suffixes(own)
    table: dict[str, Any] = placement_group_table()
    for group_id, group in table.items():
        if group_id.endswith(suffixes) or group["state"] not in ("PENDING", "RESCHEDULING"):
            continue
        if any(bundle.get("GPU") for bundle in group["bundles"].values()):
            return True
    return False


def gpus_are_idle() -> bool:
    """Return whether the nodes with GPUs run nothing, and hold no place but for this driver's job.

    A placement group that waits holds nothing; the one of this driver that has its place is not in use yet.
    """
    free: dict[str, Resources] = available_resources_per_node()
    own: dict[str, Counter[str]] = defaultdict(Counter)
    for node, bundle in _places():
        own[node].update(bundle)
    for node in ray.nodes():
        node_id, total = node["NodeID"], node["Resources"]
        if not node["Alive"] or not total.get("GPU"):
            continue
        for kind in ("CPU", "GPU"):
            in_use = total.get(kind, 0) - free.get(node_id, {}).get(kind, 0)
            if in_use - own[node_id][kind] >= SMALLEST_SHARE:
                return False
    return True


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
def _pending_placement_group(config: RunConfig) -> Generator[None]:
    """Request the workers' resources from Ray: the scaling alarms count the requests that wait in Ray.

    A run that gives no number of workers asks for one, because one more node brings all its GPUs. The group holds what
    it gets, so it is removed before the workers' own is requested.
    """
    bundle = {"CPU": 1.0} if config.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
    group = placement_group([bundle] * (config.workers[0] if config.workers else 1))
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


def failover_of(
    num_workers: int, use_gpu: bool, others_wait: Callable[[], bool] = other_jobs_wait
) -> ZoneFailover | None:
    """Return the zone failover for this many workers; None without a stack."""
    info = read_cluster_info()
    if not info:
        return None
    needed = _instances_needed(num_workers, use_gpu, info)
    return ZoneFailover(info, needed, gpus_are_idle, others_wait, latest=read_cluster_info)


def _instances_needed(num_workers: int, use_gpu: bool, info: ClusterInfo) -> int:
    """Return the number of instances that this many workers need: one worker per GPU, or all on one without GPUs."""
    return math.ceil(num_workers / (info["gpus"] or 1)) if use_gpu else 1
