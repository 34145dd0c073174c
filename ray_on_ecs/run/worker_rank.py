"""A worker's place among the workers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train import collective


@dataclass(frozen=True)
class WorkerRank:
    """Ranks of a worker and sizes of its group; the defaults are of a group of one.

    Attributes:
        rank: Its rank among all workers.
        world_size: The number of all workers.
        local_rank: Its rank among the workers of its node.
        local_world_size: The number of these.
        node_rank: The rank of its node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def of_ray_train(cls) -> WorkerRank:
        """Return the rank of this process, which is a worker of Ray Train."""
        context = ray.train.get_context()
        return cls(
            context.get_world_rank(),
            context.get_world_size(),
            context.get_local_rank(),
            context.get_local_world_size(),
            context.get_node_rank(),
        )

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every worker."""
        return value if self.world_size == 1 else collective.broadcast_from_rank_zero(value)

    def wait_for_others(self) -> None:
        """Wait until every worker has called this."""
        if self.world_size > 1:
            collective.barrier()
