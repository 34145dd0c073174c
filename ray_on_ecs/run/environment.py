"""Environment variables by which a script finds the other workers: torchrun's, and TensorFlow's TF_CONFIG.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_on_ecs.run.worker_rank import WorkerRank

# True if the process group's store is served already, so that rank 0's script does not serve it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Variables that are equal on all ranks, for launchers that set the ranks differently from torchrun.
OF_EVERY_RANK = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *(AGENT_STORE, "TORCHELASTIC_RESTART_COUNT"),  # PyTorch reads the second if the first is True
)

# Ray imports these when a script calls Ray Train's or Ray Tune's `fit`.
CALLBACK_VARIABLES = ("RAY_TRAIN_CALLBACKS", "RAY_TUNE_CALLBACKS")
NOT_A_DRIVER = dict.fromkeys(CALLBACK_VARIABLES, "ray_on_ecs.run.not_a_driver.NotADriver")
# Of Ray's own variables, what a script needs that joins the cluster itself.
OF_CLUSTER = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
OF_RAY = ("RAY_", "__RAY_")
OWN = "RAY_ON_ECS_"


def without_ray(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Ray worker without the ones that Ray sets for the worker process itself."""
    return {
        name: value
        for name, value in variables.items()
        if name in OF_CLUSTER or name.startswith(OWN) or not name.startswith(OF_RAY)
    }


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment(WorkerRank):
    """The ranks of one process and the sizes of its run, as environment variables.

    Attributes:
        nodes: The number of nodes.
        max_world_size: The most ranks that the run may have: MAX of `--num-workers MIN:MAX`.
        run_name: The run's name.
        attempt: How often the processes have been started again.
        max_restarts: How often in a row they may be.
        threads: The CPU threads that it may use.
    """

    nodes: int
    max_world_size: int
    run_name: str
    attempt: int
    max_restarts: int
    threads: int

    def variables(self, addresses: Sequence[tuple[str, int]], store: tuple[str, int] | None = None) -> dict[str, str]:
        """Return the worker's environment variables.

        Args:
            addresses: Host and free port of each rank.
            store: Address at which the process group's store is served already; by default rank 0's script serves it at
                the first of the addresses.
        """
        host, port = store or addresses[0]
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "MAX_WORLD_SIZE": self.max_world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self.run_name,
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            AGENT_STORE: store is not None,
            "OMP_NUM_THREADS": self.threads,
            "TF_CONFIG": self._tf_config(addresses),
        }
        return {name: str(value) for name, value in values.items()}

    def _tf_config(self, addresses: Sequence[tuple[str, int]]) -> str:
        hosts = [f"{host}:{port}" for host, port in addresses]
        return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": self.rank}})
