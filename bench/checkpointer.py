"""The time for which a checkpoint blocks the loop: Checkpointer, the recipes' own checkpoints, and torch.save."""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.checkpointing import BUCKET, CREDENTIALS, LITTLE, moto
from bench.harness import Bench, on_two_workers
from bench.report import Comparison, at_most, spread
from ray_on_ecs import Checkpointer
from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.tracking.storage import RunStorage
from training.engine.epochs import EpochState
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.trainer import ImageTrainer, MetricSums

ROUNDS = 7
OURS, RECIPES, TO_DISK, TO_BUCKET = "Checkpointer", "the recipes'", "torch.save to a disk", "torch.save to S3"


def measure(bench: Bench) -> list[Comparison]:
    """Save resnet18 under DDP on two ranks in each way, in turn."""
    bench.log(f"checkpointer: {ROUNDS} checkpoints of resnet18 in four ways, on two ranks")
    with moto() as endpoint:
        config = ImageConfig(storage_path=f"s3://{BUCKET}/runs", run_name="bench")
        seconds = on_two_workers(_save, config, bench.dataset, endpoint)
    return [compare(other, seconds) for other in (TO_DISK, TO_BUCKET, RECIPES)]


def compare(other: str, seconds: dict[str, list[float]]) -> Comparison:
    """Compare the times for which the loop was blocked, round by round."""
    ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[other], strict=True)]
    ratio = statistics.median(ratios)
    return Comparison(
        name=f"A checkpoint's blocked time, of that of {other}",
        reference=f"{spread([1000 * each for each in seconds[other]])} ms",
        ours=f"{spread([1000 * each for each in seconds[OURS]])} ms",
        n=len(ratios),
        note="resnet18 and AdamW (134 MB), DDP on two ranks; Checkpointer and the recipes' store it in the background",
        data={OURS: seconds[OURS], other: seconds[other]},
        ratio=ratio,
        target=at_most(ratio, 1.25 if other == RECIPES else 1.0),
    )


def _save(config: ImageConfig, dataset: Dataset, endpoint: str) -> dict[str, list[float]]:
    """On each rank; the seconds that the loop was blocked, by the way to save."""
    os.environ.update({**CREDENTIALS, **LITTLE, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
    trainer = ImageTrainer(config, dataset, torch.device("cpu"))
    bucket = RunStorage.open(config.storage_path, "torch")
    checkpoint = Checkpointer(f"s3://{BUCKET}/runs/ours", model=trainer.ddp_model, optimizer=trainer.optimizer)
    images = torch.randn(8, *dataset.train.images.shape[1:])
    labels = torch.zeros(8, dtype=torch.int64)

    def step() -> None:
        cross_entropy(trainer.ddp_model(images), labels).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    def to_disk() -> None:
        if dist.get_rank() == 0:
            torch.save(_state(trainer), Path(folder, "checkpoint.pt"))
        dist.barrier()

    def to_bucket() -> None:
        if dist.get_rank() == 0:
            content = io.BytesIO()
            torch.save(_state(trainer), content)
            bucket.write("checkpoint.pt", content.getvalue())
        dist.barrier()

    storage = RunStorage.open(config.storage_path, str(config.run_name))
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(trainer, storage, config, score="loss") as manager:
        manager.resume()
        ways = {OURS: checkpoint.save, TO_DISK: to_disk, TO_BUCKET: to_bucket, RECIPES: manager.save}
        for _ in range(ROUNDS + 1):
            for name, save in ways.items():
                step()
                checkpoint.step += 1
                trainer.current_epoch = EpochState(MetricSums(trainer.device), 0.0, checkpoint.step)  # of the recipe's
                dist.barrier()
                began = time.perf_counter()
                save()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                checkpoint.wait()
                while manager.save_in_progress:
                    time.sleep(0.01)
    checkpoint.close()
    return {name: each[1:] for name, each in seconds.items()}  # without what is imported for the first


def _state(trainer: ImageTrainer) -> dict[str, object]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
