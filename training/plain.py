"""The same training under torchrun, which starts the processes and connects them, or in one process; without Ray.

usage: python -m training.plain [FLAGS]
       torchrun --nproc-per-node 2 -m training.plain [FLAGS]

The flags are those of `python -m training`; torchrun decides the number of workers. To resume a run that was
interrupted, start it again with the same --run-name, here or under Ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.checkpoint.resume import check_not_finished, check_settings_unchanged, write_settings
from ray_on_ecs.errors import Interrupted, StorageError, TrainingError, UsageError
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.tracking.lock import hold_lock
from ray_on_ecs.tracking.report import try_write_report
from ray_on_ecs.tracking.storage import RunStorage
from training import results
from training.engine.config import TrainingConfig
from training.engine.feed import thread_feed
from training.engine.fit import Listener, fit
from training.engine.recipe import Recipe
from training.engine.trainer import EpochMetrics, Trainer
from training.recipes.registry import recipe_of
from training.recipes.settings import parse_training


def main() -> int:
    """Train as the command line says; returns the exit status (see `python -m training --help`)."""
    try:
        config = parse_training(sys.argv[1:])
        with process_group(config) as device:
            train(recipe_of(config), config, device)
    except OSError as cause:
        return _fail(StorageError(f"the run's folder can't be read or written ({short_reason(cause)})"))
    except TrainingError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted before the training started"))
    return 0


@contextmanager
def process_group(config: TrainingConfig) -> Generator[torch.device]:
    """Connect torchrun's processes, if there are several, and yield this one's device.

    Raises:
        UsageError: This node has fewer GPUs than processes.
    """
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if cuda and processes > torch.cuda.device_count():
        raise UsageError(
            f"--device: 'cuda' needs a GPU for each process ({processes} here), and there are "
            f"{torch.cuda.device_count()}; start fewer processes, or use --device cpu"
        )
    device = torch.device("cuda", _local_rank()) if cuda else torch.device("cpu")
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
        Interrupted: The user stopped it.
        TrainingError: The run can't be started or continued; if rank 0 refuses, every rank raises its error.
    """
    with ExitStack() as lock:
        config = _from_rank_0(lambda: _prepare(recipe, config, device, lock))
        try:
            _train(recipe, config, device)
        except KeyboardInterrupt as stop:
            raise Interrupted(f"interrupted; continue with --run-name {config.run_name}") from stop


class EpochLines(Listener):
    """Prints rank 0's line for each epoch, and remembers when the first step was done."""

    def __init__(self, config: TrainingConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self.first_step: float | None = None

    def step(self, step: int, steps: int) -> None:
        """Remember the first step."""
        self.first_step = self.first_step or time.time()

    def epoch(self, metrics: EpochMetrics) -> None:
        """Print the epoch's line."""
        if self._trainer.rank == 0:
            print(results.worker_epoch_line(metrics, self._config, 0, self._trainer.device), flush=True)


def _prepare(recipe: Recipe, config: TrainingConfig, device: torch.device, lock: ExitStack) -> TrainingConfig:
    """Resolve the settings, check the run's folder and lock it, for all ranks: another might find another data set."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_workers not in (None, world_size):
        raise UsageError(f"--num-workers: {config.num_workers} is not torchrun's number, {world_size}; leave it out")
    config = replace(recipe.prepare(config).resolve_defaults(), num_workers=world_size).resolve_device(device.type)
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    storage.check_writable()
    check_not_finished(storage)
    lock.enter_context(hold_lock(storage, lambda line: print(f"ray-on-ecs: {line}", flush=True)))
    check_settings_unchanged(config, storage)
    write_settings(storage, config)
    return config


def _train(recipe: Recipe, config: TrainingConfig, device: torch.device) -> None:
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    cpus = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = recipe.build(config, device, thread_feed(config.data_workers or max(1, cpus)))
    lines = EpochLines(config, trainer)
    with CheckpointManager(
        trainer,
        storage,
        config,
        score=recipe.score,
        on_epoch_saved=lambda history: results.write_metrics(storage, recipe, history),
    ) as checkpoints:
        fit(trainer, checkpoints, config.epochs, lines)
    files = results.write_files(storage, recipe, trainer)
    if trainer.rank == 0:
        summary = results.run_summary(trainer, checkpoints.summary, files)
        document = results.write_results(storage, recipe, config, summary, lines.first_step)
        try_write_report(storage, lambda line: print(f"ray-on-ecs: {line}", flush=True))
        Console().print(results.table(document, recipe, trainer.history))
        print(f"results in {storage.uri}")


def _from_rank_0(call: Callable[[], TrainingConfig]) -> TrainingConfig:
    """Return the result of `call` on rank 0, or raise its error, on every rank."""
    outcome: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = [call()]
        except (TrainingError, OSError) as error:
            outcome = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _fail(error: TrainingError) -> int:
    """Print the error and return the exit status; of errors that are alike on all ranks, one line for each node."""
    if _local_rank() == 0 or isinstance(error, StorageError):
        print(f"ray-on-ecs: {error}", file=sys.stderr)
    return error.exit_status


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _end(status: int) -> NoReturn:
    """End this process; one of several without Python's own end.

    Gloo's threads may still let go of the tensors of the last exchange. One that needs the interpreter's lock for that
    while Python ends is ended by Python, and C++ then ends the process with SIGABRT: of a run that has trained well,
    torchrun would say that it failed.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
