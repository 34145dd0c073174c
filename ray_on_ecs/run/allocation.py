"""The workers that fit into the CPUs and GPUs of some nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError, counted
from ray_on_ecs.run.local_gpus import count_gpus

WORKERS_WITHOUT_GPUS = 2

Resources = dict[str, float]


@dataclass(frozen=True)
class WorkerAllocation:
    """The workers of a run: their number, the CPUs that each of them may use, and a GPU each or none.

    Attributes:
        limits: Minimum and maximum number of workers of an elastic run.
        node_labels: The labels that the workers' nodes must have, as Ray selects nodes by them.
    """

    num_workers: int
    use_gpu: bool
    cpus_per_worker: int
    limits: tuple[int, int] | None = None
    node_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def fewest(self) -> int:
        """The fewest workers with which the run trains."""
        return self.limits[0] if self.limits else self.num_workers

    @property
    def most(self) -> int:
        """The most workers that the run takes."""
        return self.limits[1] if self.limits else self.num_workers

    @property
    def resources_per_worker(self) -> Resources:
        """The resources that Ray reserves for a worker."""
        resources = {"CPU": float(self.cpus_per_worker)}
        if self.use_gpu:
            resources["GPU"] = 1.0
        return resources

    def __str__(self) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        number = str(self.num_workers)
        if self.limits:
            number += f" ({self.limits[0]} to {self.limits[1]})"
        return f"{number} x {kind}, {counted(self.cpus_per_worker, 'CPU thread')} each"


def allocate_workers(config: RunConfig, nodes: list[Resources]) -> WorkerAllocation | None:
    """Allocate as many workers as there is room for, with as many CPUs as fit; None if that is too few.

    Args:
        config: Its `num_workers` and `device`; by default one worker for each GPU, or two where there is none.
        nodes: The CPUs and GPUs of each node of the cluster.
    """
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    use_gpu = config.device == "cuda" or (config.device == "auto" and gpus > 0)
    default = gpus if use_gpu else WORKERS_WITHOUT_GPUS
    least, most = config.workers or (default, default)
    workers = min(most, sum(workers_per_node(node, 1, use_gpu) for node in nodes))
    if workers < max(least, 1):
        return None
    if use_gpu:  # a GPU's share of its node's CPUs, so that runs can share the node
        shares = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU")]
    else:
        shares = [node.get("CPU", 0) for node in nodes]
    cpus = max(int(max(shares)), 1)
    while sum(workers_per_node(node, cpus, use_gpu) for node in nodes) < workers:
        cpus -= 1
    return WorkerAllocation(workers, use_gpu, cpus, (least, most) if least < most else None)


def workers_per_node(node: Resources, cpus: int, use_gpu: bool) -> int:
    """Return the number of workers with so many CPUs, and with a GPU each, for which a node has room."""
    return int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) if use_gpu else math.inf))


def allocate_here(config: RunConfig) -> WorkerAllocation:
    """Return the workers of a run on this machine, which share its CPUs, however many they are.

    Raises:
        ResourceError: It lacks GPUs.
    """
    least = config.workers[0] if config.workers else WORKERS_WITHOUT_GPUS
    node: Resources = {"CPU": float(max(os.cpu_count() or 1, least)), "GPU": float(count_gpus())}
    allocation = allocate_workers(config, [node])
    if allocation is None:
        raise ResourceError(shortage_message(config, [node], 0.0))
    return allocation


def describe_resources(nodes: list[Resources]) -> str:
    """Return the number of nodes with their CPUs and GPUs in words."""
    cpus, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
    return f"the cluster has {counted(len(nodes), 'node')} with {counted(cpus, 'CPU')} and {counted(gpus, 'GPU')}"


def shortage_message(config: RunConfig, nodes: list[Resources], seconds: float, shortage: str = "") -> str:
    """Return the error of a run for which these nodes lack room; `shortage` is what EC2 lacks, if that is known."""
    subject = f"--num-workers {config.num_workers}" if config.num_workers else "the run"
    devices = {"cuda": "a GPU and a CPU", "cpu": "a CPU", "auto": "a GPU or a CPU"}[config.device]
    way_out = shortage or "ask for fewer workers, another --device, or add nodes"
    wait = f", after a wait of {seconds:.0f} s" if seconds else ""
    return f"{subject} needs {devices} for each worker, but {describe_resources(nodes)}{wait}; {way_out}"
