"""Which runs may go on, and with which settings."""

from training.config import TrainingConfig, flag
from training.errors import UsageError
from training.storage import RESULT, SETTINGS, RunStorage
from training.store import CheckpointStore

# What may differ when a run is continued: where it is kept and how it is kept going, not what it computes.
FREE_TO_CHANGE = frozenset(
    {
        "bucket_mb",
        "checkpoint_seconds",
        "cloudwatch_namespace",
        "compile",
        "data_dir",
        "data_on_device",
        "device",
        "fused_optimizer",
        "keep_checkpoints",
        "max_failures",
        "max_preemptions",
        "max_stale",
        "stall_timeout",
        "static_graph",
        "storage_path",
        "wait_seconds",
    }
)


def is_begun(storage: RunStorage) -> bool:
    """Whether there is a checkpoint to go on from."""
    return bool(CheckpointStore(storage).names)


def refuse_finished(storage: RunStorage) -> None:
    """Raise UsageError where the run has its results already."""
    if (document := storage.read_json(RESULT)) is None:
        return
    raise UsageError(
        f"--run-name: run {storage.run_name!r} is finished ({document['metrics']['epoch'] + 1} epochs, test accuracy "
        f"{document['metrics']['test_accuracy']:.4f}, results in {storage.uri}); "
        "to train again give another --run-name, or delete that folder"
    )


def refuse_other_settings(config: TrainingConfig, storage: RunStorage) -> None:
    """Raise UsageError where the run was started with other settings: its curve would be two runs'."""
    if not is_begun(storage):
        return
    before, now = storage.read_json(SETTINGS) or {}, config.to_dict()
    changed = [name for name in now if name not in FREE_TO_CHANGE and before.get(name) != now[name]]
    if changed:
        details = ", ".join(f"{flag(name)} {before.get(name)} (now {now[name]})" for name in changed)
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was started with {details}; "
            "repeat those settings to continue it, or give another --run-name"
        )
