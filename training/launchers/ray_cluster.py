"""The Ray cluster that a run is on: join it or start one on this machine, and find room for the workers."""

import logging
import math
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import ray
from ray import PlacementGroupID, cloudpickle
from ray.exceptions import AuthenticationError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from rich.console import Console

from training.config import RunConfig
from training.errors import ResourceError, UsageError
from training.launchers import network_interface

CPU_WORKERS = 2
SECONDS_BETWEEN = 2.0
KNOCK_SECONDS = 5.0

Resources = dict[str, float]


@dataclass(frozen=True)
class WorkerAllocation:
    """The workers of a run: how many, on GPUs or not, and how many CPUs each may use.

    Where their number may change, `limits` are the fewest and the most.
    """

    num_workers: int
    use_gpu: bool
    cpus_per_worker: int
    limits: tuple[int, int] | None = None

    @property
    def resources_per_worker(self) -> Resources:
        """What Ray reserves for a worker."""
        return {"CPU": float(self.cpus_per_worker), **({"GPU": 1.0} if self.use_gpu else {})}

    def __str__(self) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        number = f"{self.num_workers} ({self.limits[0]} to {self.limits[1]})" if self.limits else self.num_workers
        return f"{number} x {kind}, {self.cpus_per_worker} CPU threads each"


def connect(config: RunConfig) -> bool:
    """Join the cluster of `RAY_ADDRESS` or one that runs on this machine, or else start one here.

    Returns:
        Whether the cluster is this machine alone, started for this run.

    Raises:
        ResourceError: `RAY_ADDRESS` names a cluster that doesn't answer.
        UsageError: The cluster wants another token than `RAY_AUTH_TOKEN`, or any.
    """
    try:
        return _join_or_start(config, os.environ.get("RAY_ADDRESS") or "auto")
    except AuthenticationError as cause:
        raise UsageError("RAY_AUTH_TOKEN: is missing or not the one of this Ray cluster; set the cluster's") from cause


def _join_or_start(config: RunConfig, address: str) -> bool:
    # By value: Ray runs the hook before a worker process can import what lies in the driver's directory.
    cloudpickle.register_pickle_by_value(network_interface)
    hook = {"worker_process_setup_hook": network_interface.use_route_to_head}
    init = partial(ray.init, logging_level=logging.ERROR)
    if address != "local":
        _check_reachable(address)
        try:
            init(address=address, runtime_env=hook)
            return False
        except ConnectionError as cause:
            if address != "auto":
                raise ResourceError(f"RAY_ADDRESS: no Ray cluster answers at {address!r} ({cause})") from cause
    cpus = max(os.cpu_count() or 1, config.workers[0] if config.workers else CPU_WORKERS)
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody announces the end of one's own machine
    network_interface.use_route_to(
        "127.0.0.1"
    )  # the workers inherit it; with the hook Ray would have to start others for them
    init(address="local", num_cpus=cpus)
    return True


def wait_for_workers(config: RunConfig, seconds: float, console: Console) -> WorkerAllocation:
    """The allocation of the run's workers, once the cluster has room for them; Ray knows meanwhile what is missing.

    Raises:
        ResourceError: It hasn't within `seconds`.
    """
    if allocation := allocate_workers(config, nodes := _nodes()):
        return allocation
    if not seconds:
        raise ResourceError(_shortage_message(config, nodes, seconds))
    with _pending_placement_group(config), console.status("looking for workers") as status:
        deadline = time.monotonic() + seconds
        while not (allocation := allocate_workers(config, nodes := _nodes())):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ResourceError(_shortage_message(config, nodes, seconds))
            status.update(f"{_describe_resources(nodes)}; waiting up to {left:.0f} s for more")
            time.sleep(min(SECONDS_BETWEEN, left))
    return allocation


def release_workers() -> None:
    """Remove the placement groups of this driver's job.

    Ray Train's cleaner takes charge of a group only when all its workers have started. The group of a controller that
    dies before that stays, with its CPUs and GPUs, as long as the driver lives.
    """
    job_id = ray.get_runtime_context().get_job_id()
    for group_id, group in placement_group_table().items():
        if group_id.endswith(job_id) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))


def allocate_workers(config: RunConfig, nodes: list[Resources]) -> WorkerAllocation | None:
    """The most workers there is room for, with as many CPUs each as fit; None where there are too few.

    Args:
        config: Says how many workers on which device; by default one a GPU, or two where there is none.
        nodes: The CPUs and GPUs of each node of the cluster.
    """
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    use_gpu = config.device == "cuda" or (config.device == "auto" and gpus > 0)
    default = gpus if use_gpu else CPU_WORKERS
    least, most = config.workers or (default, default)
    workers = min(most, sum(_workers_per_node(node, 1, use_gpu) for node in nodes))
    if workers < max(least, 1):
        return None
    cpus = int(max(node.get("CPU", 0) for node in nodes))
    while sum(_workers_per_node(node, cpus, use_gpu) for node in nodes) < workers:
        cpus -= 1
    return WorkerAllocation(workers, use_gpu, cpus, (least, most) if least < most else None)


def _check_reachable(address: str) -> None:
    """See that something listens at `host:port`: Ray itself would try for ever."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except OSError as cause:
        raise ResourceError(
            f"RAY_ADDRESS: nothing listens at {address!r} ({cause}); correct it, or unset it to use this machine"
        ) from cause


@contextmanager
def _pending_placement_group(config: RunConfig) -> Generator[None]:
    """Ask Ray for the workers' places, as whoever starts instances looks at what waits in Ray.

    Without a number of workers it is one: a node of the kind that comes first brings as many as it has GPUs. The group
    holds the places that it gets, so it goes before Ray Train asks for its own.
    """
    place = {"CPU": 1.0} if config.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
    group = placement_group([place] * (config.workers[0] if config.workers else 1))
    try:
        yield
    finally:
        remove_placement_group(group)


def _workers_per_node(node: Resources, cpus: int, use_gpu: bool) -> int:
    return int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) if use_gpu else math.inf))


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _describe_resources(nodes: list[Resources]) -> str:
    cpus, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
    return f"the cluster has {len(nodes)} node{'s' * (len(nodes) != 1)} with {cpus} CPUs and {gpus} GPUs"


def _shortage_message(config: RunConfig, nodes: list[Resources], seconds: float) -> str:
    wanted = f"--num-workers {config.num_workers}" if config.num_workers else "the run"
    on = {"cuda": "a GPU and a CPU", "cpu": "a CPU", "auto": "a GPU or a CPU"}[config.device]
    return (
        f"{wanted} needs {on} for each worker, but {_describe_resources(nodes)}, after a wait of {seconds:.0f} s; "
        "ask for fewer workers, another --device, or add nodes"
    )
