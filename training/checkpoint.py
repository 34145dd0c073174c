"""A checkpoint: a folder with the weights as a plain state_dict, and beside them what training needs to go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.errors import on_one_line
from training.loop import Metrics, Replica
from training.storage import WEIGHTS

STATE = "training_state.pt"
FILES = (WEIGHTS, STATE)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is written from, while training goes on.

    Attributes:
        step: Optimizer steps before it.
        weights: The model's state_dict, on the CPU.
        state: Replica.state(), likewise.
        ended: Whether an epoch has just ended.
    """

    step: int
    weights: dict[str, Any]
    state: dict[str, Any]
    ended: bool

    @property
    def history(self) -> list[Metrics]:
        """The metrics of the epochs before it."""
        return self.state["history"]

    def write(self, folder: Path) -> None:
        """Write the files of the checkpoint.

        Raises:
            OSError: They could not be written, as where the disk is full.
        """
        try:
            torch.save(self.weights, folder / WEIGHTS)
            torch.save(self.state, folder / STATE)
        except RuntimeError as cause:  # PyTorch's own writer has no other
            raise OSError(f"{folder} can't be written: {on_one_line(cause)}") from cause


def take(replica: Replica) -> Snapshot | None:
    """A snapshot on rank 0, None on the others; every rank must call it, for the states of all are gathered."""
    state = replica.state()
    if replica.rank:
        return None
    ended = replica.under_way is None and bool(replica.history)
    return Snapshot(replica.step, _copied(replica.model.state_dict()), _copied(state), ended)


def load(replica: Replica, folder: Path) -> None:
    """Continue a replica where the checkpoint was taken; every rank must call it."""
    weights, state = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in FILES)
    replica.load(weights, state)


def _copied(value: Any) -> Any:
    """The same with copies of its tensors, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each) for each in value)
    return value
