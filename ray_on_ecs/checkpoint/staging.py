"""A copy of the state in host memory, taken between two steps by all ranks.

The planners of torch.distributed.checkpoint decide which rank copies and writes what: of tensors that several ranks
have alike, each writes some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.dcp import StagingPlanner
from ray_on_ecs.checkpoint.index import CheckpointIndex, Manifest
from ray_on_ecs.checkpoint.state import TrainingState


class DivergedError(ArithmeticError):
    """A weight is not a finite number; no checkpoint has it. All ranks raise it at the same step."""


@dataclass(frozen=True)
class Copy:
    """A rank's part of a checkpoint in host memory.

    Attributes:
        name: The checkpoint's folder.
        plan: The items that this rank writes.
        planner: It has the copies.
        metadata: On rank 0 the items of all ranks.
        manifest: The manifest, still without files.
    """

    name: str
    plan: SavePlan
    planner: StagingPlanner
    metadata: Metadata | None
    manifest: Manifest


def take_copy(state: TrainingState, manifest: Manifest, ranks: Collectives, index: CheckpointIndex | None) -> Copy:
    """Copy the state; all ranks must call it, rank 0 with the index of the checkpoints.

    Raises:
        DivergedError: A weight is not finite.
    """
    planner = StagingPlanner()
    planner.set_up_planner(state.collect(), is_coordinator=ranks.rank == 0)
    plans: list[Any] = ranks.gather((planner.create_local_plan(), state.is_finite()))
    metadata = None
    if index is not None:
        if wrong := [rank for rank, (_, is_finite) in enumerate(plans) if not is_finite]:
            plans = [wrong] * len(plans)
        else:
            plans, metadata = planner.create_global_plan([plan for plan, _ in plans])
            plans = FileSystemWriter("").prepare_global_plan(plans)  # which names the files
            name = index.new_name(manifest["step"])
            plans = [(name, plan) for plan in plans]
    plan = ranks.scatter(plans)
    if isinstance(plan, list):
        step = manifest["step"]
        raise DivergedError(f"weights of rank {plan[0]} are not finite after step {step}; they are not saved")
    name, plan = plan
    return Copy(name, planner.finish_plan(plan), planner, metadata, manifest)
