"""Lightning: its Trainer, whose last checkpoint is where a restart continues.

torchrun --nproc-per-node 2 examples/lightning_fit.py
ray-on-ecs run --local --num-workers 2 --requirements examples/lightning.txt examples/lightning_fit.py

Lightning finds the other processes by torchrun's variables; the Trainer is told how many there are.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sine(lightning.LightningModule):
    """A small network that learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def on_train_start(self) -> None:
        """Say where a training continues."""
        if self.current_epoch:
            print(f"rank {self.global_rank}: resuming at epoch {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        """Print the loss of the epoch."""
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss'].item():.4f}")


def main() -> None:
    """Fit it, on the processes that are there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 4096).unsqueeze(1)
    data = TensorDataset(inputs, inputs.sin() + 0.1 * torch.randn_like(inputs))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[ModelCheckpoint(".", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path("last.ckpt")
    trainer.fit(Sine(), DataLoader(data, batch_size=64, shuffle=True), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
