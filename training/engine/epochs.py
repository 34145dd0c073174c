"""What the trainers of all recipes have in common: the ranks, the epochs in progress and finished, the loop over steps.

Rank and world size are those of torch.distributed if a process group is up.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_on_ecs.errors import DivergedError
from training.engine import random_state
from training.engine.step_timer import StepTimer
from training.engine.trainer import OnStep

# Every so many steps the loss is read from the device and must be a finite number.
FINITE_CHECK_STEPS = 100


@dataclass
class EpochState:
    """An epoch in progress.

    Attributes:
        sums: This rank's sums of the loss and the recipe's other measures: `mean()` returns, with its `loss`, the means
            over all ranks, and `load(state)` adds other sums.
        learning_rate: The learning rate of its first step.
        step: Number of its steps that are done.
        seconds: Time that they took.
    """

    sums: Any
    learning_rate: float
    step: int = 0
    seconds: float = 0.0

    def position(self) -> dict[str, Any]:
        """Return all but the sums, which differ between the ranks."""
        return {"learning_rate": self.learning_rate, "step": self.step, "seconds": self.seconds}


class EpochTrainer(ABC):
    """The part of a `Trainer` that doesn't depend on what is trained.

    Attributes:
        device: Where the model and the batches are.
        rank: This process among all of the run.
        world_size: Number of these processes.
        timer: The step times of the current epoch.
        history: The metrics of the finished epochs.
        current_epoch: The epoch in progress, or None between epochs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's collectives on objects use the current device
        self.timer = StepTimer(device)
        self.history: list[Any] = []
        self.current_epoch: EpochState | None = None

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one, counted from 0."""
        return len(self.history)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.current_epoch is not None

    @property
    def step(self) -> int:
        """Optimizer steps done since the start of the training."""
        return self.epoch * self.steps_per_epoch + (self.current_epoch.step if self.current_epoch else 0)

    @abstractmethod
    def _step(self, microbatches: Sequence[Any], sums: Any, /) -> None:
        """Take one step of the optimizer from this rank's micro-batches. Nothing waits for the device."""

    @abstractmethod
    def _advice(self) -> str:
        """Return what to do about a training that has diverged."""

    def _train(self, network: nn.Module, epoch: EpochState, batches: Iterator[Any], on_step: OnStep) -> Any:
        """Train the rest of the epoch; returns the means over all of it, on all ranks."""
        network.train()
        self.timer.start()
        before = epoch.seconds
        started = time.perf_counter()
        for microbatches in self.timer.timed_batches(batches):
            self._step(microbatches, epoch.sums)
            self.timer.end_step()
            epoch.step += 1
            if epoch.step % FINITE_CHECK_STEPS == 0:
                self._check_finite("training loss", epoch.sums.mean().loss)
            epoch.seconds = before + time.perf_counter() - started
            on_step(epoch.step, self.steps_per_epoch)
        means = epoch.sums.mean()  # waits for the device, so the time is that of the steps, not of launching them
        epoch.seconds = before + time.perf_counter() - started
        self._check_finite("training loss", means.loss)
        return means

    def _sync_gradients(self, network: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which DDP only accumulates gradients, unless it is a step's `last` micro-batch."""
        if last or not isinstance(network, DistributedDataParallel):
            return nullcontext()
        return network.no_sync()

    def _check_finite(self, what: str, value: float) -> None:
        """Raise DivergedError unless a value, which all ranks have in common, is finite."""
        if math.isfinite(value):
            return
        step = self.current_epoch.step if self.current_epoch else self.steps_per_epoch
        raise DivergedError(
            f"the {what} is {value} in epoch {self.epoch} by step {step} of {self.steps_per_epoch}; {self._advice()}"
        )

    def _load_epochs(self, progress: Mapping[str, Any], sums: Any) -> None:
        """Take over the finished epochs and the position in the one in progress, which begins with these sums."""
        self.history = list(progress["history"])
        self.current_epoch = EpochState(sums, **progress["epoch"]) if progress["epoch"] else None

    def _load_ranks(self, progress: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take over the random states and the sums of the ranks that saved them, as many as there are now or not."""
        as_many = progress["world_size"] == self.world_size
        if as_many or self.rank < len(ranks):
            random_state.restore(ranks[0 if as_many else self.rank]["random"], self.device)
        if self.current_epoch:
            for each in ranks if as_many or self.rank == 0 else []:  # they are added up over the ranks later
                self.current_epoch.sums.load(each["sums"])
