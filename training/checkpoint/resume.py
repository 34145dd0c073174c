"""Which runs may go on, and with which settings."""

from dataclasses import fields

from training.checkpoint.store import CheckpointStore
from training.config import RunConfig, flag
from training.errors import UsageError
from training.run import layout
from training.run.storage import RunStorage


def has_checkpoint(storage: RunStorage) -> bool:
    """Whether there is a checkpoint to go on from."""
    return bool(CheckpointStore(storage).names)


def check_not_finished(storage: RunStorage) -> None:
    """Raise UsageError where the run has its results already."""
    if (document := storage.read_json(layout.RESULT)) is None:
        return
    raise UsageError(
        f"--run-name: run {storage.run_name!r} is finished ({document['metrics']['epoch'] + 1} epochs, "
        f"results in {storage.uri}); "
        "to train again give another --run-name, or delete that folder"
    )


def check_settings_unchanged(config: RunConfig, storage: RunStorage) -> None:
    """Raise UsageError where the run was started with other settings: its curve would be two runs'."""
    if not has_checkpoint(storage):
        return
    before, now = storage.read_json(layout.SETTINGS) or {}, config.to_dict()
    changed = [name for name in _fixed(config) if before.get(name) != now[name]]
    if changed:
        details = ", ".join(f"{flag(name)} {before.get(name)} (now {now[name]})" for name in changed)
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was started with {details}; "
            "repeat those settings to continue it, or give another --run-name"
        )


def _fixed(config: RunConfig) -> list[str]:
    """Return the settings that a run keeps for good."""
    return [spec.name for spec in fields(config) if not spec.metadata["may_change"]]
