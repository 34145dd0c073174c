"""A callback for Lightning, which saves its own checkpoints."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ray_on_ecs.checkpoint.reclaim import Reclaim


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
        """Save and leave, on all ranks at the same step.

        Raises:
            SystemExit: By `should_stop` Lightning would validate, and its other checkpoints would say that the epoch is
                over.
        """
        is_step = trainer.global_step != self._step  # else its gradients are still being accumulated
        self._step = trainer.global_step
        if is_step and not trainer.should_stop and self._reclaim.is_near():
            trainer.save_checkpoint(self._path)
            raise SystemExit(0)
