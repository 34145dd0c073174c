"""Plain PyTorch under torchrun's variables: DDP, and a snapshot from which a restart continues.

    torchrun --nproc-per-node 2 examples/ddp_snapshot.py
    ray-on-ecs run --local --num-workers 2 --metric 'loss=loss {number}' examples/ddp_snapshot.py

Nothing here knows of Ray or of this project.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Fit a small network to a noisy sine, and save a snapshot after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 4096).unsqueeze(1)
    data = TensorDataset(inputs, inputs.sin() + 0.1 * torch.randn_like(inputs))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    snapshot = Path("snapshot.pt")
    first = 0
    if snapshot.exists():
        saved = torch.load(snapshot, map_location=device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        print(f"rank {rank}: resuming at epoch {first}")

    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}")
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, snapshot.with_suffix(".tmp"))
            snapshot.with_suffix(".tmp").replace(snapshot)  # whole or not at all
    dist.destroy_process_group()
    # Without Python's own end: a thread of Gloo's that still frees a tensor of the last all-reduce would abort it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
