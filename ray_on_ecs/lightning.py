"""A callback for Lightning, whose checkpoints stay its own."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ray_on_ecs.checkpoint.reclaim import Reclaim


class SaveBeforeReclaim(Callback):
    """Save to a file and stop at the end of a batch when a node of the run is being reclaimed.

    Args:
        path: The file, which `fit(ckpt_path=...)` resumes from.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._reclaim = Reclaim()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Save and ask for the end of the training, on all ranks at the same step."""
        if not trainer.should_stop and self._reclaim.is_near():
            trainer.save_checkpoint(self._path)
            trainer.should_stop = True
