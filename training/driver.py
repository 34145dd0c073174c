"""A run from the command to the result: check everything, let Ray Train train, write what came of it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import (
    CheckpointConfig,
    ControllerError,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer
from rich.console import Console

from training import cloudwatch, cluster, data, model, results, worker
from training.cluster import Placement
from training.config import TrainingConfig, flag
from training.errors import Interrupted, ResourceError, TrainingError, UsageError
from training.progress import ProgressBar, look, new_board
from training.storage import METRICS, PLAIN, RESULT, SETTINGS, RunStorage

# What may differ when a run is continued: where it is kept and how it is kept going, not what it computes.
FREE_TO_CHANGE = frozenset(
    {
        "bucket_mb",
        "cloudwatch_namespace",
        "compile",
        "data_dir",
        "data_on_device",
        "device",
        "fused_optimizer",
        "keep_checkpoints",
        "max_failures",
        "max_preemptions",
        "static_graph",
        "storage_path",
        "wait_seconds",
    }
)

LONGEST_CAUSE = 300
START_TIMEOUT, LEAST_START_SECONDS = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", 60.0


def run(config: TrainingConfig, console: Console) -> dict[str, Any]:
    """Train as `config` says and leave the results in the run's folder.

    Returns:
        The document of `result.json`.

    Raises:
        UsageError: A setting, folder or data set can't be used; nothing was created.
        ResourceError: The cluster has no room for the workers.
        TrainingError: Training failed; the checkpoints so far are kept.
    """
    asked_for = config.dataset
    config, storage = _prepare(config)
    try:
        config, placement = _place(config, storage, console)
        _announce(config, asked_for, storage, placement, console)
        outcome, checkpoint, first_step = _fit(config, storage, placement, console)
        document = results.write(storage, config, outcome, checkpoint, first_step)
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
    _refuse_finished(storage)
    return config, storage


def _place(config: TrainingConfig, storage: RunStorage, console: Console) -> tuple[TrainingConfig, Placement]:
    """Find room for the workers and note their number and device in the settings."""
    alone = cluster.connect(config)
    placement = cluster.wait_for_workers(config, 0 if alone else config.wait_seconds, console)
    config = replace(config, num_workers=placement.num_workers, device="cuda" if placement.use_gpu else "cpu")
    _refuse_other_settings(config, storage)
    storage.write_json(SETTINGS, config.to_dict())
    return config, placement


def _fit(
    config: TrainingConfig, storage: RunStorage, placement: Placement, console: Console
) -> tuple[dict[str, Any], str, float | None]:
    """Train; what the workers returned, the path of the last checkpoint, and when the first step was done."""
    board = new_board()
    os.environ[START_TIMEOUT] = str(max(config.wait_seconds, LEAST_START_SECONDS))
    trainer = TorchTrainer(
        worker.train,
        train_loop_config={"config": config, "storage": storage, "board": board},
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=RunConfig(
            name=storage.run_name,
            storage_path=storage.base,
            storage_filesystem=storage.filesystem,
            checkpoint_config=CheckpointConfig(num_to_keep=config.keep_checkpoints),
            # Without a limit the controller would ask for ever for workers that it can't have; START_TIMEOUT is how
            # long it waits for them, at the start and when a lost node is to be replaced.
            failure_config=FailureConfig(
                max_failures=config.max_failures,
                max_preemption_failures=config.max_preemptions,
                controller_failure_limit=0,
            ),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        with (
            ProgressBar(board, config.epochs, console),
            cloudwatch.published(board, config.cloudwatch_namespace, console),
        ):
            result: Any = trainer.fit()
    except SystemExit as stop:  # Ray Train's own answer to Ctrl-C, after it has stopped the workers
        raise Interrupted(f"interrupted; continue with --run-name {config.run_name}") from stop
    except TrainingFailedError as failure:
        raise _explain(failure, config) from failure
    state = look(board)
    return result.return_value, result.checkpoint.path, state.first_step if state else None


def _refuse_finished(storage: RunStorage) -> None:
    if (document := storage.read_json(RESULT)) is None:
        return
    raise UsageError(
        f"--run-name: run {storage.run_name!r} is finished ({document['metrics']['epoch'] + 1} epochs, test accuracy "
        f"{document['metrics']['test_accuracy']:.4f}, results in {storage.uri}); "
        "to train again give another --run-name, or delete that folder"
    )


def _refuse_other_settings(config: TrainingConfig, storage: RunStorage) -> None:
    """A run goes on with the settings it was started with, or its curve would be two runs'."""
    if not storage.exists(METRICS):
        return
    before, now = storage.read_json(SETTINGS) or {}, config.to_dict()
    if before.get(PLAIN):
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was trained by training.plain, whose runs can't be continued; give "
            "another --run-name"
        )
    changed = [name for name in now if name not in FREE_TO_CHANGE and before.get(name) != now[name]]
    if changed:
        details = ", ".join(f"{flag(name)} {before.get(name)} (now {now[name]})" for name in changed)
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was started with {details}; "
            "repeat those settings to continue it, or give another --run-name"
        )


def _explain(failure: TrainingFailedError, config: TrainingConfig) -> TrainingError:
    """The one line for a failed run: a mistake of the user's as it is, else the cause and how to go on."""
    if isinstance(failure, WorkerGroupError):
        rank, cause = min(failure.worker_failures.items())
        cause = getattr(cause, "cause", None) or cause
        if isinstance(cause, UsageError):
            return cause
        return TrainingError(
            f"training failed on rank {rank}: {_on_one_line(cause)}; "
            f"fix it and continue with --run-name {config.run_name}"
        )
    cause = failure.controller_failure if isinstance(failure, ControllerError) else failure
    if type(cause).__name__ == "WorkerGroupStartupTimeoutError":  # of Ray's internals: it has no public name
        return ResourceError(
            f"the cluster has the {config.num_workers} workers' CPUs and GPUs, but they were not free within "
            f"{config.wait_seconds:.0f} s; wait for the other run to end, or ask for fewer workers"
        )
    return TrainingError(f"training could not go on: {_on_one_line(cause)}; continue with --run-name {config.run_name}")


def _on_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_CAUSE]


def _announce(
    config: TrainingConfig, asked_for: str, storage: RunStorage, placement: Placement, console: Console
) -> None:
    begun = storage.exists(METRICS)
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
