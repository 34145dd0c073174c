"""The same training without Ray: alone, or under torchrun, which starts the processes and connects them.

usage: python -m training.plain [FLAGS]
       torchrun --nproc-per-node 2 -m training.plain [FLAGS]

The flags are those of `python -m training`; torchrun decides the number of workers. To resume a run that was
interrupted, start it again with the same --run-name, here or under Ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from training.checkpoint.manager import CheckpointManager
from training.checkpoint.resume import check_not_finished, check_settings_unchanged, write_settings
from training.config import parse
from training.engine.config import TrainingConfig
from training.engine.fit import Listener, fit
from training.engine.recipe import Recipe
from training.engine.trainer import Trainer
from training.errors import StorageError, TrainingError, UsageError
from training.recipes.images.config import ImageConfig
from training.recipes.images.recipe import IMAGES
from training.run import results
from training.run.storage import RunStorage, short_reason


def main() -> int:
    """Train as the command line says; returns the exit status (see `python -m training --help`)."""
    try:
        config = parse(ImageConfig, sys.argv[1:])
        with process_group(config) as device:
            train(IMAGES, config, device)
    except OSError as cause:
        print(f"training: the run's folder can't be read or written ({short_reason(cause)})", file=sys.stderr)
        return StorageError.exit_status
    except TrainingError as error:
        print(f"training: {error}", file=sys.stderr)
        return error.exit_status
    return 0


@contextmanager
def process_group(config: TrainingConfig) -> Generator[torch.device]:
    """Connect torchrun's processes, if there are several, and yield this one's device.

    Raises:
        UsageError: There are fewer GPUs than processes.
    """
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    index = int(os.environ.get("LOCAL_RANK", 0))
    if cuda and index >= torch.cuda.device_count():
        raise UsageError(
            f"--device: 'cuda' needs a GPU for each process, but there are {torch.cuda.device_count()} here"
        )
    device = torch.device("cuda", index) if cuda else torch.device("cpu")
    if "WORLD_SIZE" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(recipe: Recipe, config: TrainingConfig, device: torch.device) -> None:
    """Train the remaining epochs on this rank; rank 0 prints a line for each and writes the results.

    Raises:
        TrainingError: The run can't be started or continued.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_workers not in (None, world_size):
        raise UsageError(f"--num-workers: {config.num_workers} is not torchrun's number, {world_size}; leave it out")
    config = replace(_prepare(recipe, config), num_workers=world_size, device=device.type)
    storage = _open(config)
    trainer = recipe.build(config, device)
    lines = EpochLines(config, trainer)
    with CheckpointManager(
        trainer,
        storage,
        config,
        score=recipe.score,
        on_epoch_saved=lambda history: results.write_metrics(storage, recipe, history),
    ) as checkpoints:
        fit(trainer, checkpoints, config.epochs, lines)
    if trainer.rank == 0:
        summary = results.run_summary(trainer, checkpoints.summary)
        document = results.write_results(storage, recipe, config, summary, lines.first_step)
        Console().print(results.table(document, recipe, trainer.history))
        print(f"results in {storage.uri}")


class EpochLines(Listener):
    """Prints rank 0's line for each epoch, and remembers when the first step was done."""

    def __init__(self, config: TrainingConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self.first_step: float | None = None

    def step(self, step: int, steps: int) -> None:
        """Remember the first step."""
        self.first_step = self.first_step or time.time()

    def epoch(self, metrics: Any) -> None:
        """Print the epoch's line."""
        if self._trainer.rank == 0:
            print(results.worker_epoch_line(metrics, self._config, 0, self._trainer.device), flush=True)


def _prepare(recipe: Recipe, config: TrainingConfig) -> TrainingConfig:
    """Resolve the settings on rank 0 for all: another rank might find another data set, and would find another name."""
    return _from_rank_0(recipe.prepare(config).resolve_defaults() if _is_first() else None)


def _open(config: TrainingConfig) -> RunStorage:
    """Open the run's folder, which rank 0 checks."""
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    if _is_first():
        storage.check_writable()
        check_not_finished(storage)
        check_settings_unchanged(config, storage)
        write_settings(storage, config)
    return storage


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


if __name__ == "__main__":
    sys.exit(main())
