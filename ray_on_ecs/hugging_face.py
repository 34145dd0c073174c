"""Callback for Hugging Face's Trainer that saves its checkpoint before a node is reclaimed."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ray_on_ecs.checkpoint.collectives import Reclaim


class SaveBeforeReclaim(TrainerCallback):
    """Save and end the script at the end of a step when a node of the run is being reclaimed."""

    def __init__(self) -> None:
        self._reclaim = Reclaim()
        self._ends = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Request a checkpoint, on all ranks at the same step."""
        if self._reclaim.is_near():
            self._ends = control.should_save = True
            control.should_evaluate = False  # Trainer evaluates before it saves, and that may take all the time
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exit once this checkpoint is complete.

        Raises:
            SystemExit: Instead of `should_training_stop`, after which Trainer would load the best model, delete this
                checkpoint if `save_total_limit` is 1, and return as if the training had ended.
        """
        if self._ends:
            raise SystemExit(0)
