"""Callback for Lightning that saves its checkpoint before a node is reclaimed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ray_on_ecs.checkpoint.collectives import Reclaim


class SaveBeforeReclaim(Callback):
    """Save to a file and end the script at the end of a step when a node of the run is being reclaimed.

    Args:
        path: The file, which `fit(ckpt_path=...)` resumes from.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._reclaim = Reclaim()
        self._step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Save and exit, on all ranks at the same step.

        Raises:
            SystemExit: Instead of `should_stop`, after which Lightning would validate, and save other checkpoints as
                if the epoch had ended.
        """
        is_step = trainer.global_step != self._step  # False while gradients are accumulated
        self._step = trainer.global_step
        if is_step and not trainer.should_stop and self._reclaim.is_near():
            trainer.save_checkpoint(self._path)
            raise SystemExit(0)
