"""Hugging Face Accelerate: a custom training loop, whose whole state is saved after each epoch.

accelerate launch --num_processes 2 examples/accelerate_loop.py
ray-on-ecs run --local --num-workers 2 --requirements examples/accelerate.txt examples/accelerate_loop.py

Accelerate finds the other processes by torchrun's variables, which either command sets.
"""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Epochs:
    """Counts the epochs that are done; Accelerate saves it with the rest."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a count that was saved."""
        self.done = state["done"]


def main() -> None:
    """Teach a small network to tell two clouds of points apart."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    labels = torch.randint(2, (4096,))
    points = torch.randn(4096, 2) + 2.0 * labels.unsqueeze(1)
    loader = DataLoader(TensorDataset(points, labels), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    epochs = Epochs()
    accelerator.register_for_checkpointing(epochs)
    newest = Path("newest")
    if newest.exists():
        accelerator.load_state(newest.read_text())
        print(f"rank {accelerator.process_index}: resuming at epoch {epochs.done}")

    for epoch in range(epochs.done, args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")

        epochs.done = epoch + 1
        accelerator.save_state(f"epoch-{epoch}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            newest.with_suffix(".tmp").write_text(f"epoch-{epoch}")
            newest.with_suffix(".tmp").replace(newest)  # whole or not at all
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            shutil.rmtree(f"epoch-{epoch - 2}", ignore_errors=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
