"""Ray Tune: a sweep over learning rates and widths, whose worse trials ASHA stops early.

ray-on-ecs run --run-name sweep examples/ray_tune.py --samples 8

With the same --run-name the sweep resumes: finished trials stay, and the others go on from their last checkpoints. By
`python examples/ray_tune.py`, --name and --storage-path say the same.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn


def train(config: dict[str, Any]) -> None:
    """Train one trial on handwritten digits; report its accuracy and save a checkpoint after each epoch."""
    pixels, targets = load_digits(return_X_y=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32, device=device), torch.tensor(targets, device=device)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
    first = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        for batch in torch.randperm(1500, generator=torch.Generator().manual_seed(epoch)).split(50):
            loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (network(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder, "state.pt"))
            tune.report({"accuracy": accuracy}, checkpoint=tune.Checkpoint.from_directory(folder))


def main() -> None:
    """Run the sweep, or what is left of it, and print its trials, the best first."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # without a usage, an error is one line
    parser.add_argument("--samples", type=int, default=8, help="number of trials")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each trial, such as 0.5")
    parser.add_argument("--name", default=os.environ.get("RUN_NAME"))
    parser.add_argument("--storage-path", help="whole path of a folder, or s3://bucket/prefix; by default Ray's")
    args = parser.parse_args()
    if args.samples < 1 or args.epochs < 1:
        parser.error("--samples and --epochs are at least 1")

    space = {"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([16, 64, 256]), "epochs": args.epochs}
    trainable = tune.with_resources(train, {"cpu": 1, "gpu": args.gpus})
    run = tune.RunConfig(name=args.name, storage_path=args.storage_path, verbose=1)
    path = f"{run.storage_path}/{run.name}"
    if run.name and tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, trainable=trainable, resume_errored=True)
    else:
        asha = ASHAScheduler(max_t=args.epochs, grace_period=min(2, args.epochs))
        settings = tune.TuneConfig(metric="accuracy", mode="max", num_samples=args.samples, scheduler=asha)
        tuner = tune.Tuner(trainable, param_space=space, tune_config=settings, run_config=run)
    results = tuner.fit()
    table = results.get_dataframe().sort_values("accuracy", ascending=False)
    print(table[["accuracy", "config/lr", "config/width", "training_iteration"]].to_string(index=False))


if __name__ == "__main__":
    main()
