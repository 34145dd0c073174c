"""Which runs may be resumed: the rules on the format of their folder, their settings and their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ray_on_ecs.checkpoint.store import CheckpointStore
from ray_on_ecs.config import RunConfig, flag
from ray_on_ecs.errors import UsageError
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

C = TypeVar("C", bound=RunConfig)


def write_settings(storage: RunStorage, config: RunConfig) -> None:
    """Write the settings of a run that starts or resumes, with the format of its folder."""
    storage.write_json(layout.SETTINGS, {"format": layout.FORMAT, "settings": config.to_dict()})


def newest_checkpoint(storage: RunStorage) -> str | None:
    """Return the name of the checkpoint to resume from, or None if there is none."""
    return max(CheckpointStore(storage).names, default=None)


def keep_device(config: C, storage: RunStorage) -> C:
    """Return this config; if it leaves the device open, with that of the run that is resumed.

    The precision depends on the device, and the weights on the precision.
    """
    if config.device != "auto" or newest_checkpoint(storage) is None:
        return config
    return replace(config, device=_read_settings(storage)["device"])


def check_not_finished(storage: RunStorage) -> None:
    """Raise UsageError if the run has its results already."""
    _read_settings(storage)
    if (document := storage.read_json(layout.RESULT)) is None:
        return
    raise UsageError(
        f"--run-name: run {storage.run_name!r} is finished ({document['metrics']['epoch'] + 1} epochs, "
        f"results in {storage.uri}); "
        "to train again give another --run-name, or delete that folder"
    )


def check_settings_unchanged(config: RunConfig, storage: RunStorage) -> None:
    """Raise UsageError if the run was started with other settings, which would give its curve two meanings."""
    before, now = _read_settings(storage), config.to_dict()
    if newest_checkpoint(storage) is None:
        return
    fixed = [spec.name for spec in fields(config) if not spec.metadata["may_change"]]
    changed = [name for name in fixed if before.get(name) != now[name]]
    if "recipe" in changed:  # the other settings are another recipe's
        changed = ["recipe"]
    if changed:
        details = ", ".join(f"{flag(name)} {before.get(name)} (now {now[name]})" for name in changed)
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was started with {details}; "
            "repeat those settings to continue it, or give another --run-name"
        )


def check_data_unchanged(storage: RunStorage, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError if a checkpoint was trained on other data than there is now.

    Args:
        storage: The run's folder.
        before: The trainer's data summary as the checkpoint has it.
        now: The trainer's data summary.
    """
    if before.get("fingerprint") == now.get("fingerprint"):
        return
    details = ", ".join(
        f"{name} {before.get(name)} (now {value})" for name, value in now.items() if before.get(name) != value
    )
    raise UsageError(
        f"--run-name: run {storage.run_name!r} was started with other data: {details}; "
        "give it the same data, or give another --run-name"
    )


def _read_settings(storage: RunStorage) -> dict[str, Any]:
    """Return the settings that the run was started with; none if it is new.

    Raises:
        UsageError: The folder has another format.
    """
    document = storage.read_json(layout.SETTINGS)
    if document is None and newest_checkpoint(storage) is None:
        return {}
    if not isinstance(document, dict) or document.get("format") != layout.FORMAT:
        raise UsageError(
            f"--run-name: run {storage.run_name!r} was written by another version; give another --run-name"
        )
    return document["settings"]
