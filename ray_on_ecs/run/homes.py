"""Homes of a run's workers: a Ray cluster, the driver's process on one machine, or a Ray program on the head.

The driver (run/driver.py) tells the same story in each. Only a run on one machine imports nothing of Ray.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import WORKERS
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.run.admission import Admission
from ray_on_ecs.run.allocation import WorkerAllocation, allocate_here
from ray_on_ecs.run.group import Group
from ray_on_ecs.run.launcher import Launcher, PerNodeLauncher, TorchrunLauncher
from ray_on_ecs.run.mpi.launcher import MpiLauncher
from ray_on_ecs.run.pool_choice import PoolChoice
from ray_on_ecs.run.queue import POLL_SECONDS, is_without_ray
from ray_on_ecs.run.receipt import InstanceNetwork
from ray_on_ecs.run.thread_group import ThreadGroup
from ray_on_ecs.run.worker import Settings
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.run_record import Pool
from ray_on_ecs.tracking.starts import Moments

logger = logging.getLogger(__name__)

MIN_START_SECONDS = 60.0  # processes need some time to start, whatever --worker-timeout says
# The workers of a Ray program may wait for those before them, also without a --worker-timeout.
MIN_WAIT_SECONDS = 30.0


class Home:
    """Home of a run's workers; this one is the machine of the driver, without Ray.

    Attributes:
        allocation: The workers; None if a Ray program starts them.
        is_one_node: True if there is a single node.
        cluster: The address of the Ray head, or nothing without Ray.
        launcher: Starts the script on a worker.
    """

    allocation: WorkerAllocation | None
    launcher: Launcher
    is_one_node = True
    cluster = ""

    def __init__(self, config: RunConfig) -> None:
        self.allocation = allocate_here(config)
        self.launcher = launcher_of(config)

    def new_group(self, settings: Settings) -> Group:
        """Return a group of workers, once there are nodes for them; its places are requested."""
        return ThreadGroup(settings, self.allocation.num_workers if self.allocation else 1)

    def watching(self) -> AbstractContextManager[None]:
        """Look at what the workers wait for, until the block ends."""
        return nullcontext()

    def instances(self) -> Counter[InstanceKind]:
        """Return the instances that the run uses now, counted by kind; a laptop costs nothing."""
        return Counter()

    def moments_of(self, node_ids: Collection[str]) -> list[Moments]:
        """Return how these nodes started (see tracking/starts.py); a machine without Ray has none."""
        return []

    def network_of(self, node_ids: Collection[str]) -> InstanceNetwork:
        """Return the network of these nodes' instances, as far as the stack describes it."""
        return InstanceNetwork()

    def draining(self) -> Mapping[str, float | None]:
        """Return the nodes that are being reclaimed, with the time of that (Unix time) if it is known."""
        return {}

    def is_busy(self) -> bool:
        """Return whether workers without places wait on, as other jobs use their nodes; move to others if it can."""
        return False

    def kinds(self) -> Collection[str]:
        """Return the kinds of the nodes that the run uses."""
        return (WORKERS,)

    def hardware(self) -> dict[str, Any] | None:
        """Return the hardware of a Ray program's workers; rank 0 of a script reports it itself."""
        return None

    def shortage(self) -> ResourceError | None:
        """Return the error of a Ray program that has waited too long for its workers, or None."""
        return None

    def was_reclaimed(self) -> bool:
        """Return whether nodes of a Ray program are being reclaimed, or were a short while ago."""
        return False


class RayCluster(Home):
    """The nodes of a Ray cluster; see Home."""

    def __init__(self, admitted: Admission) -> None:
        from ray_on_ecs.run import ray_cluster

        config = admitted.document.config
        self._of_ray = ray_cluster
        self._choice = _choice_of(admitted)
        self.allocation = ray_cluster.wait_for_workers(
            config, config.worker_timeout, admitted.record.waiting, self._choice
        )
        self._config = config.with_workers(self.allocation.num_workers)
        self._is_waiting = True  # the first group belongs to this wait
        self._seconds = max(config.worker_timeout, MIN_START_SECONDS)
        self._record = admitted.record
        self.is_one_node = ray_cluster.is_one_node()
        self.cluster = os.environ["RAY_ADDRESS"]
        self.launcher = launcher_of(config)

    def new_group(self, settings: Settings) -> Group:
        """See Home.

        Raises:
            ResourceError: Nodes have not come back within the worker timeout.
        """
        from ray_on_ecs.run.worker_group import RayGroup

        if self._choice and not self._is_waiting:
            self._choice.wait_anew()
        self._is_waiting = False
        self.allocation = self._of_ray.wait_for_workers(
            self._config,
            self._seconds,
            lambda: nullcontext(self._record.note_waiting(True)),
            self._choice,
            self.allocation,
        )
        return RayGroup(replace(settings, threads=self.allocation.cpus_per_worker), self.allocation, self._seconds)

    def is_busy(self) -> bool:
        """See Home."""
        self._is_waiting = self.allocation is not None and self._of_ray.has_nodes(self.allocation)
        return self._is_waiting and not (self._choice and self._choice.move_on(self._seconds, has_nodes=True))

    def kinds(self) -> Collection[str]:
        """See Home."""
        return (self._choice.kind,) if self._choice else super().kinds()

    def instances(self) -> Counter[InstanceKind]:
        """See Home."""
        return self._of_ray.instances_with_workers()

    def moments_of(self, node_ids: Collection[str]) -> list[Moments]:
        """See Home."""
        return self._of_ray.moments_of(node_ids)

    def network_of(self, node_ids: Collection[str]) -> InstanceNetwork:
        """See Home."""
        if not self._choice:
            return super().network_of(node_ids)
        info, kind = self._choice.info, self._choice.kind
        group, gbits = info["groups"][kind], info["network_gbits"]
        types = self._of_ray.types_of(node_ids) or group["types"]
        slowest = min((gbits[name] for name in types if name in gbits), default=None)
        return InstanceNetwork(tuple(types), group.get("efa", 0), slowest)

    def draining(self) -> Mapping[str, float | None]:
        """See Home."""
        from ray_on_ecs.run.ray_private import draining_nodes

        return draining_nodes()


class RayProgram(Home):
    """A Ray program on the head: one worker, whose script starts the others; see Home."""

    def __init__(self, admitted: Admission, sources: Mapping[str, str]) -> None:
        from ray_on_ecs.run import ray_cluster
        from ray_on_ecs.run.program import resources, worker
        from ray_on_ecs.run.program.launcher import ProgramLauncher

        document, record = admitted.document, admitted.record

        def note_waiting(needs: resources.Needs) -> None:
            record.note_waiting(bool(needs))
            if needs:
                why = self._watch.unmet or ray_cluster.describe_nodes()
                logger.info(f"the program waits for {resources.describe(needs)}; {why}")

        self.allocation = None
        self.is_one_node = ray_cluster.is_one_node()
        self.cluster = os.environ["RAY_ADDRESS"]
        self._resources = resources
        self._seconds = max(document.config.worker_timeout, MIN_WAIT_SECONDS)
        self._watch = resources.ProgramWatch(note_waiting)
        needs = worker.needs_of(document.config, document.code, sources)
        self.launcher = ProgramLauncher(document.storage, needs, self._watch)

    def watching(self) -> AbstractContextManager[None]:
        """See Home."""
        return self._watch.running()

    def instances(self) -> Counter[InstanceKind]:
        """See Home."""
        return self._resources.instances(self._watch.pid)

    def kinds(self) -> Collection[str]:
        """See Home."""
        return self._resources.kinds(self._watch.pid) or super().kinds()

    def hardware(self) -> dict[str, Any] | None:
        """See Home."""
        return self._watch.hardware

    def shortage(self) -> ResourceError | None:
        """See Home."""
        shortage = self._watch.shortage(self._seconds)
        return ResourceError(shortage) if shortage else None

    def was_reclaimed(self) -> bool:
        """See Home."""
        return self._watch.was_reclaimed()


def _choice_of(admitted: Admission) -> PoolChoice | None:
    """Return the choice of a run's node group once it has begun; None without a stack, and if it has no candidates."""
    from ray_on_ecs.run import ray_cluster

    config, info, record = admitted.document.config, admitted.info, admitted.record
    if info is None or admitted.place is None or not admitted.kinds:
        return None

    def note(pool: Pool) -> None:
        record.note_pool(pool)
        admitted.document.note(pool=pool)

    def needed(kind: str, latest: ClusterInfo) -> tuple[int, int]:
        return ray_cluster.instances_needed(config.fewest_workers, kind, latest, use_gpu=choice.uses_gpus)

    def has_room(kind: str) -> bool:
        return ray_cluster.has_free_room(config, kind, choice.info, use_gpu=choice.uses_gpus)

    choice = PoolChoice(config, info, admitted.place, needed, note)
    if not choice.begin(has_room):  # its pool was removed while it was queued
        logger.info("waiting: other runs use the pools that can hold this one")
        with record.waiting():
            while not choice.begin(has_room):
                time.sleep(POLL_SECONDS)
    return choice


@contextmanager
def home_of(admitted: Admission, sources: Mapping[str, str]) -> Generator[Home]:
    """Return the home of a run's workers, once there is room for them.

    Raises:
        ResourceError: The cluster can't be reached, or lacks room.
        UsageError: The cluster wants another token.
    """
    config = admitted.document.config
    if is_without_ray() and not config.driver:
        yield Home(config)
        return
    from ray_on_ecs.run import ray_cluster

    with ray_cluster.connected(), ray_cluster.ending_without_head(config):
        yield RayProgram(admitted, sources) if config.driver else RayCluster(admitted)


def launcher_of(config: RunConfig) -> Launcher:
    """Return the launcher of a script's processes."""
    if config.mpi:
        return MpiLauncher()
    return PerNodeLauncher() if config.per_node else TorchrunLauncher()
