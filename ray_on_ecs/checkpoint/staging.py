"""Copy of the state in host memory, which all ranks take between two steps.

The planners of torch.distributed.checkpoint divide the work: every rank copies and writes its shards, and some of the
replicated tensors.
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
    """A weight is NaN or infinite, and is not saved. All ranks raise it at the same step."""


@dataclass(frozen=True)
class Copy:
    """Part of a checkpoint in a rank's host memory.

    Attributes:
        name: The checkpoint's folder.
        plan: The items that this rank writes.
        planner: The planner with the copies of the items.
        metadata: The metadata of all ranks' items, on rank 0.
        manifest: The manifest without the files.
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
    gathered = ranks.gather((planner.create_local_plan(), state.is_finite()))
    metadata = None
    messages: list[Any] = []  # for each rank: its plan and the folder, or the first rank that has diverged
    if index is not None:
        diverged = [rank for rank, (_, is_finite) in enumerate(gathered) if not is_finite]
        if diverged:
            messages = [diverged[0]] * len(gathered)
        else:
            global_plan, metadata = planner.create_global_plan([plan for plan, _ in gathered])
            name = index.new_name(manifest["step"])
            # prepare_global_plan names the files.
            messages = [(name, plan) for plan in FileSystemWriter("").prepare_global_plan(global_plan)]
    message = ranks.scatter(messages)
    if isinstance(message, int):
        step = manifest["step"]
        raise DivergedError(f"weights of rank {message} are not finite after step {step}; they are not saved")
    name, plan = message
    return Copy(name, planner.finish_plan(plan), planner, metadata, manifest)
