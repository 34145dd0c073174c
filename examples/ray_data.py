"""Ray Data and Ray Train: CPU helpers prepare the batches on which the workers train.

ray job submit --working-dir examples -- python ray_data.py --num-workers 2 --gpus --helpers

It is a driver as in Ray's own documents, and needs no launcher. Without --helpers the CPUs of all nodes do it, as on a
laptop: python examples/ray_data.py
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import ray.train
import torch
import torch.distributed as dist
from ray.data import ExecutionOptions
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

SAMPLES = 4096
# The label that a stack gives to its helpers: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
NODE_GROUP, HELPERS = "ray.io/node-group", "helpers"


def prepare(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make samples of their numbers, and note where: real data would be read, decoded and augmented here."""
    numbers = batch["id"]
    points = np.stack([np.sin(numbers), np.cos(3 * numbers)], axis=1).astype(np.float32)
    place = np.full(len(numbers), ray.util.get_node_ip_address())
    return {"id": numbers, "x": points, "y": points.prod(axis=1, keepdims=True), "place": place}


def train(config: dict[str, int]) -> None:
    """Fit a small network on one worker's share of the batches, and save a checkpoint after each epoch."""
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    model = prepare_model(network)
    shard = ray.train.get_dataset_shard("train")

    for epoch in range(first, config["epochs"]):
        losses, numbers, places = [], [], Counter()
        for batch in shard.iter_batches(batch_size=64):
            x, y = (torch.tensor(batch[name], device=get_device()) for name in ("x", "y"))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            numbers += batch["id"].tolist()
            places.update(batch["place"].tolist())
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        report(epoch, losses, numbers, places, state)


def report(epoch: int, losses: list[float], numbers: list[int], places: Counter[str], state: dict[str, Any]) -> None:
    """Report what all workers have seen in an epoch; rank 0 prints it and stores the checkpoint."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (losses, numbers, places))
    loss = float(np.mean([each for share in shares for each in share[0]]))
    seen = [each for share in shares for each in share[1]]
    by_place = dict(sum((share[2] for share in shares), Counter()))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {len(seen)} samples, {len(set(seen))} different, from {by_place}")
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)


def main() -> None:
    """Prepare and train, side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker; instances are started if needed")
    parser.add_argument("--helpers", action="store_true", help="prepare on the helpers alone; one is started if needed")
    parser.add_argument("--run-name", default="ray-data")
    args = parser.parse_args()

    ray.init()
    data = ray.data.range(SAMPLES, override_num_blocks=16).map_batches(prepare)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        datasets={"train": data},
        dataset_config=ray.train.DataConfig(
            execution_options=ExecutionOptions(label_selector={NODE_GROUP: HELPERS} if args.helpers else None)
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.num_workers,
            use_gpu=args.gpus,
            label_selector={NODE_GROUP: f"!{HELPERS}"},
        ),
        # Under this name and path the same command goes on from the last checkpoint.
        run_config=ray.train.RunConfig(
            name=args.run_name,
            storage_path=os.environ.get("RAY_ON_ECS_STORAGE_PATH"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
