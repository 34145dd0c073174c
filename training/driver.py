"""A run from the command to the result: check everything, let Ray Train train, write what came of it."""

import math
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer
from rich.console import Console

from training import cloudwatch, cluster, data, failure, model, results, worker
from training.cluster import Placement
from training.config import TrainingConfig, flag
from training.errors import Interrupted, StorageError, TrainingError
from training.progress import ProgressBar, look, new_board
from training.resuming import is_begun, refuse_finished, refuse_other_settings
from training.stall import StallWatch
from training.storage import ERROR, RESULT, SETTINGS, RunStorage, reason

START_TIMEOUT, LEAST_START_SECONDS = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", 60.0


def run(config: TrainingConfig, console: Console) -> dict[str, Any]:
    """Train as `config` says and leave the results in the run's folder.

    Returns:
        The document of `result.json`.

    Raises:
        UsageError: A setting, folder or data set can't be used; nothing was created.
        ResourceError: The cluster has no room for the workers.
        TrainingError: Training failed; the checkpoints so far are kept, and `error.json` says what happened.
    """
    asked_for = config.dataset
    config, storage = _prepare(config)
    try:
        config, placement, board = _place(config, storage, console)
        _announce(config, asked_for, storage, placement, console)
        outcome, first_step = _fit(config, storage, placement, board, console)
        document = results.write(storage, config, outcome, first_step)
    except OSError as cause:
        raise StorageError(
            f"{storage.uri} can't be read or written ({reason(cause)}); continue with --run-name {config.run_name}"
        ) from cause
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is Ray's own answer to Ctrl-C and SIGTERM
        raise Interrupted(f"interrupted; continue with --run-name {config.run_name}") from stop
    finally:
        ray.shutdown()
    _conclude(document, outcome["history"], console)
    return document


def _prepare(config: TrainingConfig) -> tuple[TrainingConfig, RunStorage]:
    """Check all that can be checked without a cluster."""
    model.find(config.model)
    if config.data_dir is not None:  # Ray gives its workers another working directory
        config = replace(config, data_dir=str(Path(config.data_dir).expanduser().absolute()))
    config = replace(config, dataset=data.choose(config)).completed()
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    storage.check_writable()
    refuse_finished(storage)
    return config, storage


def _place(config: TrainingConfig, storage: RunStorage, console: Console) -> tuple[TrainingConfig, Placement, Any]:
    """Find room for the workers and note their number and device in the settings; with them the run's board."""
    alone = cluster.connect(config)
    board = new_board(storage)
    placement = cluster.wait_for_workers(config, 0 if alone else config.wait_seconds, console)
    number = config.num_workers or placement.num_workers
    config = replace(config, num_workers=number, device="cuda" if placement.use_gpu else "cpu")
    refuse_other_settings(config, storage)
    storage.write_json(SETTINGS, config.to_dict())
    storage.delete(ERROR)
    return config, placement, board


def _fit(
    config: TrainingConfig, storage: RunStorage, placement: Placement, board: Any, console: Console
) -> tuple[dict[str, Any], float | None]:
    """Train; what rank 0 returned, and when the first step was done."""
    stalls = StallWatch(board, config.stall_timeout, storage, console)
    try:
        with (
            ProgressBar(board, config.epochs, console),
            cloudwatch.published(board, config.cloudwatch_namespace, console),
            stalls,
            tempfile.TemporaryDirectory(prefix="ray-train-") as folder,
        ):
            outcome = _fit_and_fit_again(config, storage, placement, board, folder)
    except TrainingFailedError as cause:
        raise failure.explain(cause, config, storage, board, stalls) from cause
    state = look(board)
    return outcome, state.first_step if state else None


def _fit_and_fit_again(
    config: TrainingConfig, storage: RunStorage, placement: Placement, board: Any, folder: str
) -> dict[str, Any]:
    """What rank 0 returned when it had finished; until then start the workers anew each time nodes are taken away."""
    for left in range(config.max_preemptions, -1, -1):
        on_sigint = signal.getsignal(signal.SIGINT)
        try:
            result: Any = _trainer(config, storage, placement, board, folder, left).fit()
        finally:
            signal.signal(signal.SIGINT, on_sigint)  # Ray Train leaves its own, which no longer ends anything
        if (state := look(board)) and state.given_up:
            raise failure.given_up(state.given_up, config, storage, board)
        if worker.PREEMPTED not in result.return_value:
            return result.return_value
    too_often = f"workers were taken away more than {config.max_preemptions} times ({flag('max_preemptions')})"
    raise failure.given_up(TrainingError(too_often), config, storage, board)


def _trainer(
    config: TrainingConfig, storage: RunStorage, placement: Placement, board: Any, folder: str, preemptions: int
) -> TorchTrainer:
    """Ray Train with the run's workers and its patience; the checkpoints are the workers' own business (keeper.py)."""
    # A number of workers that may change is taken from what Ray had when it last looked, just before a node was lost:
    # then it waits in vain, and looks again.
    patience = LEAST_START_SECONDS if placement.limits else max(config.wait_seconds, LEAST_START_SECONDS)
    os.environ[START_TIMEOUT] = str(patience)
    return TorchTrainer(
        worker.train,
        train_loop_config={"config": config, "storage": storage, "board": board},
        scaling_config=ScalingConfig(
            num_workers=placement.limits or placement.num_workers,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=RunConfig(
            name=storage.run_name,
            storage_path=folder,  # where Ray Train would keep checkpoints if it were given any
            # Without a limit the controller would ask for ever for workers that it can't have; START_TIMEOUT is how
            # long it waits for them, at the start and when a lost node is to be replaced.
            failure_config=FailureConfig(
                max_failures=config.max_failures,
                max_preemption_failures=preemptions,  # those that come without notice
                controller_failure_limit=math.ceil(config.wait_seconds / patience) if placement.limits else 0,
            ),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )


def _announce(
    config: TrainingConfig, asked_for: str, storage: RunStorage, placement: Placement, console: Console
) -> None:
    begun = is_begun(storage)
    instead = asked_for == "auto" and config.dataset == "digits"
    lines = {
        "run": config.run_name,
        "model": f"{config.model}, {config.epochs} epochs" + ", continued from the last checkpoint" * begun,
        "data": config.dataset + ", for Fashion-MNIST can't be downloaded here" * instead,
        "workers": f"{placement}, batch size {config.batch_size} each",
        "results": storage.uri,
    }
    for name, value in lines.items():
        console.print(f"[bold]{name:<9}[/]{value}", highlight=False, soft_wrap=True)


def _conclude(document: dict[str, Any], history: list[dict[str, Any]], console: Console) -> None:
    metrics, samples = document["metrics"], document["data"]["test_samples"]
    console.print(results.table(document, history))
    console.print(
        f"test accuracy [bold]{metrics['test_accuracy']:.4f}[/] over all {samples:,} test images, "
        f"{document['times']['total_seconds']:.0f} s in all",
        highlight=False,
    )
    files = ", ".join([RESULT, *document["files"].values()])
    console.print(f"results in {document['storage_path']}: {files}", highlight=False, soft_wrap=True)
