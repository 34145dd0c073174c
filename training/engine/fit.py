"""The epoch loop that every launcher runs."""

from __future__ import annotations

from typing import Protocol

from training.engine.trainer import EpochMetrics, Trainer


class Checkpoints(Protocol):
    """The checkpoints, as far as the loop uses them."""

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one."""
        ...

    def step(self, step: int, steps: int) -> None:
        """Save a checkpoint if one is due after this step of the epoch; may raise to end the training."""
        ...

    def save(self) -> None:
        """Save a checkpoint."""
        ...

    def exit_if_preempted(self) -> None:
        """Raise if the node of any rank is being reclaimed."""
        ...


class Listener:
    """Is called as the training advances; this one does nothing."""

    def resumed(self, trainer: Trainer) -> None:
        """The training is about to start, or to continue from a checkpoint."""

    def step(self, step: int, steps: int) -> None:
        """`step` of the epoch's `steps` steps are done."""

    def heartbeat(self) -> None:
        """The training is alive, though not in a step."""

    def trained(self, metrics: EpochMetrics) -> None:
        """An epoch is done; its checkpoint is not saved yet."""

    def epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is done and its checkpoint is being saved."""


def fit(trainer: Trainer, checkpoints: Checkpoints, epochs: int, listener: Listener | None = None) -> None:
    """Train the remaining epochs, with a checkpoint after each one and, when due, within it.

    Raises:
        DivergedError: The loss is not finite.
    """
    listener = listener or Listener()

    def on_step(step: int, steps: int) -> None:
        listener.step(step, steps)
        checkpoints.step(step, steps)

    checkpoints.resume()
    listener.resumed(trainer)
    while trainer.epoch < epochs:
        metrics = trainer.run_epoch(on_step, listener.heartbeat)
        listener.trained(metrics)
        checkpoints.save()
        listener.epoch(metrics)
        if trainer.epoch < epochs:
            checkpoints.exit_if_preempted()
