"""What Ray Train runs on every worker: it wires the plain loop to Ray's device, its notices and the progress board."""

import logging
import time
from contextlib import suppress
from typing import Any

import ray
import ray.train
from ray.train.torch import get_device

from training import data, results, stall
from training.config import TrainingConfig
from training.errors import StorageError, UsageError
from training.keeper import Keeper, Leave
from training.loop import Replica
from training.progress import Reporter
from training.storage import SETTINGS, RunStorage

# Where AWS tells no deadline.
NOTICE_SECONDS = 60.0
# Before the deadline nothing may be under way any more.
MARGIN_SECONDS = 5.0
# What is returned of a run that has to go on elsewhere: the ranks whose nodes go.
PREEMPTED = "preempted"


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train from the latest checkpoint, or from the start, to the last epoch.

    What another start can't mend is left on the board, and the workers that are started again return at once.

    Args:
        settings: `config` (TrainingConfig), `storage` (RunStorage) and `board` (the driver's progress board).

    Returns:
        On rank 0, what the run was made of: `data`, `hardware`, `history` and `checkpoints`; or, where nodes are taken
        away, `preempted`, for Ray Train has no way to start anew at once: it would wait for the nodes' end.
    """
    board = settings["board"]
    if ray.get(board.read.remote()).given_up:
        return {}
    try:
        return _train(settings["config"], settings["storage"], board)
    except (StorageError, UsageError) as cause:
        ray.get(board.give_up.remote(cause))
        raise


def _train(config: TrainingConfig, storage: RunStorage, board: Any) -> dict[str, Any]:
    logging.getLogger().setLevel(logging.WARNING)
    reporter = Reporter(board, ray.train.get_context().get_world_rank(), stall.whereabouts())
    _check_shared(storage)
    device = get_device()
    dataset = data.load(config.dataset, config)
    replica = Replica(config, dataset, device)
    notice = Preemption()

    def on_step(step: int, steps: int) -> None:
        reporter.step(step, steps)
        keeper.step(step, steps)

    with suppress(Leave), Keeper(replica, storage, config, notice, reporter.alive) as keeper:
        keeper.resume()
        reporter.resumed(replica.epoch, replica.step % replica.steps, replica.steps)
        while replica.epoch < config.epochs:
            metrics = replica.run_epoch(on_step, reporter.alive)
            print(results.epoch_line(metrics, config, replica.rank, device), flush=True)
            keeper.save()
            reporter.epoch(metrics)
            if replica.epoch < config.epochs:
                keeper.leave_if_told()
    if notice.ranks:
        if replica.rank == 0:
            print(f"training: ranks {notice.ranks} are to be stopped; left after step {replica.step}", flush=True)
        return {PREEMPTED: notice.ranks}
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


def _check_shared(storage: RunStorage) -> None:
    """The driver has written the settings; a folder that is another one here would lose every checkpoint."""
    if not storage.exists(SETTINGS):
        raise UsageError(
            f"--storage-path: {storage.uri} is not the same folder on every node; give s3://bucket/prefix, or a folder "
            "that all nodes share"
        )
