"""A rank's part of a checkpoint: copied between two steps, written while training continues, and loaded again."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ray_on_ecs.checkpoint import dcp
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.dcp import Reader, StagingPlanner, Writer
from ray_on_ecs.checkpoint.manifest import FileRecord, Heartbeat
from ray_on_ecs.checkpoint.trainer import Trainer, TrainerState
from ray_on_ecs.errors import one_line
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

# The model's weights in a checkpoint are `model.<name>`.
MODEL = "model"


@dataclass(frozen=True)
class Part:
    """What a rank has written: the files, and where in them the state lies."""

    files: dict[str, FileRecord]
    results: list[WriteResult]


@dataclass(frozen=True)
class Snapshot:
    """The state between two steps: this rank's part of it, in host memory.

    Attributes:
        step: Optimizer steps before it.
        history: The metrics of the epochs before it.
        ends_epoch: Whether an epoch has just ended.
        plan: What this rank writes.
        planner: Has the copies of that.
        metadata: On rank 0, what all ranks write.
    """

    step: int
    history: list[Any]
    ends_epoch: bool
    plan: SavePlan
    planner: StagingPlanner
    metadata: Metadata | None

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return layout.checkpoint_name(self.step)

    def write(self, storage: RunStorage) -> Part:
        """Write this rank's part.

        Raises:
            OSError: It could not be written, as where the disk is full.
        """
        writer = Writer(storage, self.name)
        try:
            results = writer.write_data(self.plan, self.planner).value()
        except RuntimeError as cause:  # PyTorch turns errors of the stream into its own
            raise OSError(f"{storage.uri} can't be written: {one_line(cause)}") from cause
        return Part(writer.files, results)

    def write_metadata(self, storage: RunStorage, parts: list[Part]) -> dict[str, FileRecord]:
        """Write, on rank 0, where the state lies; returns the checkpoint's files.

        Raises:
            OSError: It could not be written.
        """
        assert self.metadata is not None
        writer = Writer(storage, self.name)
        writer.finish(self.metadata, [part.results for part in parts])
        return {
            name: record for files in (*(part.files for part in parts), writer.files) for name, record in files.items()
        }


def take(trainer: Trainer, ranks: Collectives) -> Snapshot:
    """Copy the state; every rank must call it, and rank 0 decides which rank copies and writes what."""
    state = trainer.state_dict()
    ends_epoch = not trainer.in_epoch and bool(trainer.history)
    planner = StagingPlanner()
    planner.set_up_planner(
        {
            MODEL: state["model"],
            "optimizer": state["optimizer"],
            "progress": _pack(state["progress"]),
            "ranks": {str(ranks.rank): _pack(state["ranks"][0])},
        },
        is_coordinator=ranks.rank == 0,
    )
    plans = ranks.gather(planner.create_local_plan())
    metadata = None
    if ranks.rank == 0:
        plans, metadata = planner.create_global_plan(plans)
        plans = FileSystemWriter("").prepare_global_plan(plans)  # which names the files
    plan = planner.finish_plan(ranks.scatter(plans))
    return Snapshot(trainer.step, list(trainer.history), ends_epoch, plan, planner, metadata)


def load(trainer: Trainer, storage: RunStorage, name: str, world_size: int, heartbeat: Heartbeat) -> None:
    """Continue a trainer where a checkpoint was taken; every rank must call it, and reads only what it needs.

    Args:
        trainer: Its tensors are filled in place.
        storage: The run's folder.
        name: The checkpoint.
        world_size: The number of ranks that saved it.
        heartbeat: Called for each chunk that is read.
    """
    own = trainer.state_dict()
    needed = [trainer.rank] if world_size == trainer.world_size else range(world_size)
    state: dict[str, Any] = {
        MODEL: own["model"],
        "optimizer": own["optimizer"],
        "progress": b"",
        "ranks": {str(rank): b"" for rank in needed},
    }
    dcp.load(state, Reader(storage, name, heartbeat))
    loaded: TrainerState = {
        "model": state[MODEL],
        "optimizer": state["optimizer"],
        "progress": _unpack(state["progress"]),
        "ranks": [_unpack(state["ranks"][str(rank)]) for rank in needed],
    }
    trainer.load_state_dict(loaded)


def load_weights(storage: RunStorage, name: str, heartbeat: Heartbeat = lambda: None) -> dict[str, torch.Tensor]:
    """Load the model's whole state_dict from a checkpoint, without a model."""
    return dcp.load_tensors(f"{MODEL}.", Reader(storage, name, heartbeat))


def _pack(value: Any) -> bytes:
    """Return a value as the bytes of torch.save, which a planner doesn't take apart."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
