"""Launchers: how a worker starts the script, and the variables that it gets.

There are four: this file's two, for scripts that torchrun could start and for programs that start the processes of
their node, `mpi.launcher` for mpirun, and `program.launcher` for Ray programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.environment import AGENT_STORE, NOT_A_DRIVER, ScriptEnvironment
from ray_on_ecs.run.group import Peer, WorkerRank
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess

if TYPE_CHECKING:
    from ray_on_ecs.run.mpi.launcher import MpiNode

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# The script, or a worker's part of it; a context that ends it. MpiNode has those methods that a worker calls.
Process: TypeAlias = "ScriptProcess | MpiNode"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the script on a worker.

    Attributes:
        config: The run's settings.
        rank: The worker's rank.
        peers: All workers, by rank.
        number: Counts the starts from 0.
        threads: The CPU threads that a worker may use.
        environment: The node's preparation for the script.
        exchange: The folder of the messages from the script to its worker.
    """

    config: RunConfig
    rank: WorkerRank
    peers: Sequence[Peer]
    number: int
    threads: int
    environment: ScriptEnvironment
    exchange: Path

    def torchrun_variables(self) -> dict[str, str]:
        """Return the variables that torchrun sets, and TensorFlow's TF_CONFIG.

        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
        """
        rank, first = self.rank, self.peers[0]
        host, port = first.store or (first.host, first.port)
        values = {
            "RANK": rank.rank,
            "WORLD_SIZE": rank.world_size,
            "MAX_WORLD_SIZE": self.max_world_size,
            "LOCAL_RANK": rank.local_rank,
            "LOCAL_WORLD_SIZE": rank.local_world_size,
            "GROUP_RANK": rank.node_rank,
            "GROUP_WORLD_SIZE": len({peer.node_rank for peer in self.peers}),
            "ROLE_NAME": "default",
            "ROLE_RANK": rank.rank,
            "ROLE_WORLD_SIZE": rank.world_size,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self.environment.storage.run_name,
            "TORCHELASTIC_RESTART_COUNT": self.number,
            "TORCHELASTIC_MAX_RESTARTS": self.config.max_restarts,
            # PyTorch reads "1" as: serve the store, but join the one that a parent of this process serves at the port.
            AGENT_STORE: first.store is not None or 1,
            "OMP_NUM_THREADS": self.threads,
            "TF_CONFIG": _tf_config(self.peers, rank.rank),
        }
        return {name: str(value) for name, value in values.items()}

    def node_variables(self) -> dict[str, str]:
        """Return the variables of a program that starts the processes of its node."""
        firsts = {peer.node_rank: peer for peer in reversed(self.peers)}
        count = self.rank.local_world_size
        gpus = os.environ.get(VISIBLE_GPUS, ",".join(map(str, range(count))))
        values = {
            "NNODES": len(firsts),
            "NODE_RANK": self.rank.node_rank,
            "NPROC_PER_NODE": count,
            VISIBLE_GPUS: ",".join(gpus.split(",")[:count]),
            "MASTER_ADDR": firsts[0].host,
            "MASTER_PORT": firsts[0].port,
            "MAX_WORLD_SIZE": self.max_world_size,
            "OMP_NUM_THREADS": self.threads,
            "TF_CONFIG": _tf_config([firsts[node] for node in sorted(firsts)], self.rank.node_rank),
        }
        return {name: str(value) for name, value in values.items()}

    @property
    def max_world_size(self) -> int:
        """The number of workers, or the maximum of an elastic run."""
        return max(self.rank.world_size, *(self.config.workers or (0,)))

    @property
    def guard(self) -> dict[str, str]:
        """The variables that end a Ray program that was started on every worker by mistake."""
        return {} if self.config.no_driver else NOT_A_DRIVER


def _tf_config(peers: Sequence[Peer], index: int) -> str:
    hosts = [f"{peer.host}:{peer.port}" for peer in peers]
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})


class Launcher(Protocol):
    """Starts the script of one worker."""

    def variables(self, start: Start) -> dict[str, str]:
        """Return the variables of the script that this launcher sets."""

    def process(self, start: Start, options: ProcessOptions) -> Process:
        """Start the script.

        Raises:
            UsageError: It can't be started.
        """

    def look(self, process: Process, exchange: Path) -> None:
        """Look after what only this launcher's programs have; called again and again, and once after the end."""
        return


class TorchrunLauncher(Launcher):
    """Starts a process for each rank, as torchrun does."""

    def variables(self, start: Start) -> dict[str, str]:
        """See Launcher."""
        own = start.torchrun_variables() | start.guard
        return start.environment.wandb_variables(start.rank.rank) | own

    def process(self, start: Start, options: ProcessOptions) -> Process:
        """See Launcher."""
        return ScriptProcess(start.config.argv(start.environment.python, options.variables), options)


class PerNodeLauncher(TorchrunLauncher):
    """Starts a program on the first worker of each node; the program starts the node's processes."""

    def variables(self, start: Start) -> dict[str, str]:
        """See Launcher."""
        return start.node_variables() | start.guard
