"""A checkpoint: a folder with the weights as a plain state_dict, and beside them what training needs to go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.engine.trainer import Trainer
from training.errors import one_line
from training.run import layout

FILES = (layout.WEIGHTS, layout.TRAINING_STATE)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is written from, while training goes on.

    Attributes:
        step: Optimizer steps before it.
        weights: The model's state_dict, on the CPU.
        state: Trainer.state_dict(), likewise.
        ended: Whether an epoch has just ended.
    """

    step: int
    weights: dict[str, Any]
    state: dict[str, Any]
    ended: bool

    @property
    def history(self) -> list[Any]:
        """The metrics of the epochs before it."""
        return self.state["history"]

    def write(self, folder: Path) -> None:
        """Write the files of the checkpoint.

        Raises:
            OSError: They could not be written, as where the disk is full.
        """
        try:
            torch.save(self.weights, folder / layout.WEIGHTS)
            torch.save(self.state, folder / layout.TRAINING_STATE)
        except RuntimeError as cause:  # PyTorch's own writer has no other
            raise OSError(f"{folder} can't be written: {one_line(cause)}") from cause


def take(trainer: Trainer) -> Snapshot | None:
    """A snapshot on rank 0, None on the others; every rank must call it, for the states of all are gathered."""
    state = trainer.state_dict()
    if trainer.rank:
        return None
    ended = not trainer.in_epoch and bool(trainer.history)
    return Snapshot(trainer.step, _copied(trainer.model.state_dict()), _copied(state), ended)


def load(trainer: Trainer, folder: Path) -> None:
    """Continue a trainer where the checkpoint was taken; every rank must call it."""
    weights, state = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in FILES)
    trainer.load_state_dict(weights, state)


def _copied(value: Any) -> Any:
    """The same with copies of its tensors, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each) for each in value)
    return value
