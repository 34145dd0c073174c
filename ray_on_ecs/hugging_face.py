"""Callback for Hugging Face's Trainer that saves its checkpoint before a node is reclaimed."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ray_on_ecs.checkpoint.collectives import Reclaim


class SaveBeforeReclaim(TrainerCallback):
    """Save and stop at the end of a step when a node of the run is being reclaimed."""

    def __init__(self) -> None:
        self._reclaim = Reclaim()
        self._has_stopped = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Reset the state of an earlier training."""
        self._has_stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Request a checkpoint and the end of the training, on all ranks at the same step."""
        if self._reclaim.is_near():
            self._has_stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # Trainer evaluates before it saves, and that may take all the time
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Skip the end of the epoch: Trainer also calls this when it stops within an epoch."""
        if self._has_stopped:
            control.should_save = control.should_evaluate = False
        return control
