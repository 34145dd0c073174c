"""A checkpoint: a folder with the weights as a plain state_dict, and beside them what training needs to go on."""

from pathlib import Path
from typing import Any

import torch

from training.loop import Replica
from training.storage import WEIGHTS

STATE = "training_state.pt"


def name(epoch: int) -> str:
    """The folder of the checkpoint that was taken after `epoch`, counted from 0."""
    return f"checkpoint_{epoch:06d}"


def save(replica: Replica, folder: Path) -> None:
    """Write a checkpoint from rank 0; every rank must call it, for the random states are gathered."""
    state = replica.state()
    if replica.rank == 0:
        torch.save({key: value.cpu() for key, value in replica.model.state_dict().items()}, folder / WEIGHTS)
        torch.save(state, folder / STATE)


def load(replica: Replica, folder: Path) -> None:
    """Continue a replica where the checkpoint was taken."""
    replica.load(_read(folder / WEIGHTS), _read(folder / STATE))


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
