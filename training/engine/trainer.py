"""The interface between a training and its launcher, checkpoints and monitoring, whatever it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ray_on_ecs.checkpoint import trainer as checkpoint
from training.engine.step_timer import StepTimes

# Called after every step with the steps done and the steps of the epoch.
OnStep = Callable[[int, int], None]


class EpochMetrics(StepTimes):
    """What one epoch came to, over all ranks. A recipe adds `train_<name>` and `test_<name>` of its own qualities.

    Attributes:
        epoch: Its number, from 0.
        train_loss: Mean loss over the training samples.
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


class Trainer(checkpoint.Trainer, Protocol):
    """One rank of a training: a model, its optimizer and the metrics of its finished epochs.

    Attributes:
        model: The model, without wrappers of any parallelism.
        device: Where it computes.
    """

    model: torch.nn.Module
    device: torch.device

    def run_epoch(self, on_step: OnStep, on_test: Callable[[], None]) -> EpochMetrics:
        """Train the rest of the epoch, test, and add the metrics to the history; returns them.

        Raises:
            DivergedError: The loss is not finite; every rank raises it.
        """
        ...
