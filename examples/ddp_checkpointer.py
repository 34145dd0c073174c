"""ddp_snapshot.py with a Checkpointer: saved within an epoch and before a node is reclaimed, and resumed exactly.

torchrun --nproc-per-node 2 examples/ddp_checkpointer.py
ray-on-ecs run --local --num-workers 2 examples/ddp_checkpointer.py
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ray_on_ecs import Checkpointer, DistributedSampler


def main() -> None:
    """Fit a small network to a noisy sine, and export the network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 4096).unsqueeze(1)
    targets = inputs.sin() + 0.1 * torch.randn_like(inputs)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    checkpoint = Checkpointer(model=model, optimizer=optimizer, state={"sampler": sampler})
    if checkpoint.resume():
        print(f"rank {rank}: resuming at epoch {checkpoint.epoch}")

    while checkpoint.epoch < epochs and not checkpoint.should_stop:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpoint.after_step(samples=len(x) * checkpoint.world_size):
                break  # a node is being reclaimed, and all is saved
        else:
            with torch.no_grad():  # of all data, also if the epoch was interrupted
                mean = nn.functional.mse_loss(network(inputs.to(device)), targets.to(device)).item()
            if rank == 0:
                print(f"epoch {checkpoint.epoch}: loss {mean:.4f}")
            checkpoint.end_epoch(loss=mean)
    checkpoint.close(export="model.safetensors")
    dist.destroy_process_group()
    # Without Python's own end: a thread of Gloo's that still frees a tensor of the last all-reduce would abort it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
