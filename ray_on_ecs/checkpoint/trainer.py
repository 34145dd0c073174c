"""The interface between checkpoints and the training that they save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypedDict


class TrainerState(TypedDict):
    """The state of a training as one rank has it.

    Attributes:
        model: Weights and buffers by name; DTensors where the ranks have shards of them.
        optimizer: The optimizer's state by the names of the weights, as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns it.
        progress: What else the ranks have in common, of tensors and Python's own types: history, schedule, position.
        ranks: What differs between the ranks, likewise. Saved: this rank's alone. Loaded: this rank's alone if as many
            ranks saved it, else that of every rank that did.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    progress: dict[str, Any]
    ranks: list[dict[str, Any]]


class Trainer(Protocol):
    """One rank of a training, as far as checkpoints use it.

    Attributes:
        rank: This process among all of the run.
        world_size: Number of these processes.
        history: The metrics of each finished epoch.
    """

    rank: int
    world_size: int
    history: list[Any]

    @property
    def data_summary(self) -> Mapping[str, Any]:
        """Describe the data set for `result.json`: `test_samples` and a `fingerprint` that changes with the data."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one, counted from 0."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps since the start of the training."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""
        ...

    @property
    def in_epoch(self) -> bool:
        """True while an epoch is in progress."""
        ...

    def state_dict(self) -> TrainerState:
        """Return what resuming needs, without copies; every rank must call it.

        It is called to save the state after a step, and before the first one for tensors to load a checkpoint into.

        Raises:
            DivergedError: A weight is not finite, so that no checkpoint holds it; every rank raises it.
        """
        ...

    def load_state_dict(self, state: TrainerState) -> None:
        """Continue where `state` was taken; every rank must call it.

        Args:
            state: Has the tensors of this trainer's own `state_dict()`, which have been filled in place.
        """
        ...


class CheckpointOptions(Protocol):
    """The options of checkpoints: how often they are saved, and how many are kept."""

    @property
    def run_name(self) -> str | None:
        """Name of the run, for errors."""
        ...

    @property
    def keep_checkpoints(self) -> int:
        """Number of latest checkpoints to keep, in addition to the best one."""
        ...

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds between checkpoints within an epoch."""
        ...

    @property
    def max_failed_checkpoints(self) -> int:
        """Checkpoints in a row that may fail to be stored."""
        ...

    @property
    def hang_timeout(self) -> float:
        """Seconds for which a checkpoint may take longer than the steps between two."""
        ...
