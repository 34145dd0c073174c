"""The same training without Ray: alone, or under torchrun, which starts the processes and tells them of each other.

usage: python -m training.plain [FLAGS]
       torchrun --nproc-per-node 2 -m training.plain [FLAGS]

The flags are those of `python -m training`; the number of workers is torchrun's. A run that was cut off goes on when it
is started again with the same --run-name, here or under Ray.
"""

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

from training import data, results
from training.config import TrainingConfig, parse
from training.errors import StorageError, TrainingError, UsageError
from training.keeper import Keeper
from training.loop import Replica
from training.resuming import refuse_finished, refuse_other_settings
from training.storage import SETTINGS, RunStorage, reason


def main() -> int:
    """Train as the command line says; returns the exit status (see `python -m training --help`)."""
    try:
        config = parse(sys.argv[1:])
        with process_group(config) as device:
            train(config, device)
    except OSError as cause:
        print(f"training: the run's folder can't be read or written ({reason(cause)})", file=sys.stderr)
        return StorageError.exit_status
    except TrainingError as error:
        print(f"training: {error}", file=sys.stderr)
        return error.exit_status
    return 0


@contextmanager
def process_group(config: TrainingConfig) -> Generator[torch.device]:
    """This process's device, with the others of torchrun's within reach."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    index = int(os.environ.get("LOCAL_RANK", 0))
    if cuda and index >= torch.cuda.device_count():
        raise UsageError(f"--device: 'cuda' needs a GPU for each process, and here are {torch.cuda.device_count()}")
    device = torch.device("cuda", index) if cuda else torch.device("cpu")
    if "WORLD_SIZE" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(config: TrainingConfig, device: torch.device) -> None:
    """Train all epochs on this rank, or those that are left; rank 0 prints a line for each and leaves the results."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_workers not in (None, world_size):
        raise UsageError(f"--num-workers: {config.num_workers} is not torchrun's number, {world_size}; leave it out")
    config = replace(config, dataset=_choose(config), num_workers=world_size, device=device.type)
    config, storage = _open(config)
    dataset = data.load(config.dataset, config)
    replica = Replica(config, dataset, device)
    steps: list[float] = []

    def on_step(step: int, of: int) -> None:
        steps.append(time.time())
        keeper.step(step, of)

    with Keeper(replica, storage, config) as keeper:
        keeper.resume()
        while replica.epoch < config.epochs:
            metrics = replica.run_epoch(on_step)
            keeper.save()
            if replica.rank == 0:
                print(results.epoch_line(metrics, config, replica.rank, device), flush=True)
    if replica.rank == 0:
        outcome = results.outcome(replica, dataset, keeper.stored)
        document = results.write(storage, config, outcome, steps[0] if steps else None)
        Console().print(results.table(document, replica.history))
        print(f"results in {storage.uri}")


def _choose(config: TrainingConfig) -> str:
    """The data set that rank 0 finds: with `auto` another rank might find another."""
    return _shared(data.choose(config) if _is_first() else None)


def _open(config: TrainingConfig) -> tuple[TrainingConfig, RunStorage]:
    """The settings and folder of the run, which rank 0 names and looks at."""
    config = _shared(config.completed() if _is_first() else None)
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    if _is_first():
        storage.check_writable()
        refuse_finished(storage)
        refuse_other_settings(config, storage)
        storage.write_json(SETTINGS, config.to_dict())
    return config, storage


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _shared(value: Any) -> Any:
    """Rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


if __name__ == "__main__":
    sys.exit(main())
