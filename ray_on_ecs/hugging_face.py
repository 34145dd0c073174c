"""A callback for Hugging Face's Trainer, whose checkpoints stay its own."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ray_on_ecs.checkpoint.reclaim import Reclaim


class SaveBeforeReclaim(TrainerCallback):
    """Save and stop at the end of a step when a node of the run is being reclaimed."""

    def __init__(self) -> None:
        self._reclaim = Reclaim()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end of the training, on all ranks at the same step."""
        if self._reclaim.is_near():
            control.should_save = control.should_training_stop = True
        return control
