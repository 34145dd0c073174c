"""What Ray Train runs on every worker: it wires the plain loop to Ray's device, its notices and the progress board."""

import logging
import os
import time
from contextlib import suppress
from typing import Any, NoReturn

import ray.train
from ray.train.torch import get_device

from training import data, results, stall
from training.config import TrainingConfig
from training.errors import Preempted, UsageError
from training.keeper import Keeper, Leave
from training.loop import Replica
from training.progress import Reporter
from training.storage import SETTINGS, RunStorage

# Where AWS tells no deadline.
NOTICE_SECONDS = 60.0
# Before the deadline nothing may be under way any more.
MARGIN_SECONDS = 5.0
# Ray Train has to see first that workers of the node that goes are gone, or it would count a failure.
AFTER_THEM_SECONDS = 5.0


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train from the latest checkpoint, or from the start, to the last epoch.

    Args:
        settings: `config` (TrainingConfig), `storage` (RunStorage) and `board` (the driver's progress board).

    Returns:
        On rank 0, what the run was made of: `data`, `hardware`, `history` and `checkpoints`.
    """
    logging.getLogger().setLevel(logging.WARNING)  # Ray would log every report of every rank
    config: TrainingConfig = settings["config"]
    storage: RunStorage = settings["storage"]
    reporter = Reporter(settings["board"], ray.train.get_context().get_world_rank(), stall.whereabouts())
    _check_shared(storage)
    device = get_device()
    dataset = data.load(config.dataset, config)
    replica = Replica(config, dataset, device)
    notice = Preemption()

    def on_step(step: int, steps: int) -> None:
        reporter.step(step, steps)
        keeper.step(step, steps)

    with suppress(Leave), Keeper(replica, storage, config, notice, reporter.alive) as keeper:
        name = keeper.resume()
        reporter.resumed(name, replica.epoch, replica.step % replica.steps, replica.steps)
        while replica.epoch < config.epochs:
            metrics = replica.run_epoch(on_step, reporter.alive)
            print(results.epoch_line(metrics, config, replica.rank, device), flush=True)
            keeper.save()
            reporter.epoch(metrics)
            if replica.epoch < config.epochs:
                keeper.leave_if_told()
    if notice.ranks:
        _leave(replica, notice.ranks)
    return results.outcome(replica, dataset, keeper.stored)


class Preemption:
    """Ray Train's word that nodes will be taken away: a spot instance's end, a draining one, a deployment."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def __call__(self) -> float | None:
        """The moment until which all must be stored, in seconds of the epoch; the same on all ranks."""
        if (info := ray.train.get_preemption_info()) is None:
            return None
        self.ranks = info.preempted_ranks
        deadline = info.deadline_ms / 1000 if info.deadline_ms else time.time() + NOTICE_SECONDS
        return deadline - MARGIN_SECONDS


def _leave(replica: Replica, preempted: list[int]) -> NoReturn:
    """End this rank so that Ray Train counts a preemption, and starts the workers elsewhere at once.

    A worker that returned would have finished, and one that failed would count as a failure: those on the nodes that go
    end their process, the others follow.
    """
    if replica.rank == 0:
        print(f"training: ranks {preempted} are to be stopped; left after step {replica.step}", flush=True)
    if replica.rank in preempted:
        os._exit(0)
    time.sleep(AFTER_THEM_SECONDS)
    raise Preempted(f"ranks {preempted} were stopped")


def _check_shared(storage: RunStorage) -> None:
    """The driver has written the settings; a folder that is another one here would lose every checkpoint."""
    if not storage.exists(SETTINGS):
        raise UsageError(
            f"--storage-path: {storage.uri} is not the same folder on every node; give s3://bucket/prefix, or a folder "
            "that all nodes share"
        )
