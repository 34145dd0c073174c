"""The interface between a training and its launcher, checkpoints and monitoring, whatever it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypedDict

import torch

from training.engine.step_timer import StepTimes

# Called after every step with the steps done and the steps of the epoch.
OnStep = Callable[[int, int], None]


class EpochMetrics(StepTimes):
    """What one epoch came to, over all ranks. A recipe adds `train_<name>` and `test_<name>` of its own qualities.

    Attributes:
        epoch: Its number, from 0.
        train_loss: Mean loss over the training samples, with label smoothing if there is any.
        test_loss: Mean loss over the test samples.
        learning_rate: At the epoch's first step.
        train_seconds: Time spent training, on rank 0, measured when its device had finished.
        test_seconds: Time spent testing, on rank 0.
        finished: When the epoch ended, in UTC (ISO 8601).
        samples_per_second: Training samples of all ranks per second.
        steps: Optimizer steps of the epoch.
        world_size: Number of ranks that finished it.
        global_batch: Samples per step, over all ranks.
    """

    epoch: int
    train_loss: float
    test_loss: float
    learning_rate: float
    train_seconds: float
    test_seconds: float
    finished: str
    samples_per_second: float
    steps: int
    world_size: int
    global_batch: int


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
    """One rank of a training: a model, its optimizer and the metrics of its finished epochs.

    Attributes:
        model: The model, without wrappers of any parallelism.
        device: Where it computes.
        rank: This process among all of the run.
        world_size: Number of these processes.
        history: The recipe's `EpochMetrics` of each finished epoch.
    """

    model: torch.nn.Module
    device: torch.device
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
        """Whether an epoch has begun and not ended."""
        ...

    def run_epoch(self, on_step: OnStep, on_test: Callable[[], None]) -> EpochMetrics:
        """Train the rest of the epoch, test, and add the metrics to the history; returns them.

        Raises:
            DivergedError: The loss is not finite; every rank raises it.
        """
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
