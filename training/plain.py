"""The same training without Ray: alone, or under torchrun, which starts the processes and tells them of each other.

usage: python -m training.plain [FLAGS]
       torchrun --nproc-per-node 2 -m training.plain [FLAGS]

The flags are those of `python -m training`; the number of workers is torchrun's. A run that is cut off isn't continued.
"""

import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from training import checkpoint, data, results
from training.config import TrainingConfig, parse
from training.errors import TrainingError, UsageError
from training.loop import Replica
from training.storage import PLAIN, SETTINGS, RunStorage

LAST = "last"


def main() -> int:
    """Train as the command line says; returns the exit status (see `python -m training --help`)."""
    try:
        config = parse(sys.argv[1:])
        with process_group(config) as device:
            train(config, device)
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
    """Train all epochs on this rank; rank 0 prints a line for each and leaves the results."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_workers not in (None, world_size):
        raise UsageError(f"--num-workers: {config.num_workers} is not torchrun's number, {world_size}; leave it out")
    config = replace(config, dataset=_choose(config), num_workers=world_size, device=device.type).completed()
    storage = _open(config) if not dist.is_initialized() or dist.get_rank() == 0 else None
    dataset = data.load(config.dataset, config)
    replica = Replica(config, dataset, device)
    steps: list[float] = []
    while replica.epoch < config.epochs:
        metrics = replica.run_epoch(lambda step, of: steps.append(time.time()))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(replica, Path(folder))
            if storage:
                storage.upload(Path(folder), LAST)
                results.note(storage, replica.history, Path(folder))
                print(results.epoch_line(metrics, config, replica.rank, device), flush=True)
    if storage:
        document = results.write(storage, config, results.outcome(replica, dataset), storage.path(LAST), steps[0])
        Console().print(results.table(document, replica.history))
        print(f"results in {storage.uri}")


def _choose(config: TrainingConfig) -> str:
    """The data set that rank 0 finds: with `auto` another rank might find another."""
    if not dist.is_initialized():
        return data.choose(config)
    chosen = [data.choose(config) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _open(config: TrainingConfig) -> RunStorage:
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    storage.check_writable()
    if storage.exists(SETTINGS):
        raise UsageError(f"--run-name: {config.run_name!r} is a run already; give another, or delete {storage.uri}")
    storage.write_json(SETTINGS, {**config.to_dict(), PLAIN: True})
    return storage


if __name__ == "__main__":
    sys.exit(main())
