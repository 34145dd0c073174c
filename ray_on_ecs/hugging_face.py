"""A callback for Hugging Face's Trainer, which saves its own checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ray_on_ecs.checkpoint.reclaim import Reclaim


class SaveBeforeReclaim(TrainerCallback):
    """Save and stop at the end of a step when a node of the run is being reclaimed."""

    def __init__(self) -> None:
        self._reclaim = Reclaim()
        self._has_stopped = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew."""
        self._has_stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end of the training, on all ranks at the same step."""
        if self._reclaim.is_near():
            self._has_stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it comes before the checkpoint, and may take all the time
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Leave out what follows an epoch: Trainer ends the epoch in its middle as if it were at its end."""
        if self._has_stopped:
            control.should_save = control.should_evaluate = False
        return control
