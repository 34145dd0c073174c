"""Newest kept file or checkpoint of a run, which a restarted script finds, and the line for a run without one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.files.scan import is_log
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import StoredFile
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot

# Files of settings, which a script writes at its start and does not load.
SETTINGS = re.compile(
    r"(?:^|/)(?:\.hydra/.*|(?:.*[._-])?(?:args|config|configs|hparams|overrides|settings)\.(?:cfg|ini|json|toml|ya?ml))$"
)


@dataclass(frozen=True)
class Kept:
    """Newest file or checkpoint that a run has kept."""

    name: str
    written_at: datetime
    changed_at: datetime  # when anything that is kept was last written
    is_loaded: bool = False  # by a Checkpointer, which resumes from its checkpoint; any other is the script's to load

    def __str__(self) -> str:
        return f"{self.name} of {self.written_at:%Y-%m-%d %H:%M:%S} UTC"


def newest_stored(config: RunConfig, storage: RunStorage) -> Kept | None:
    """Return the newest kept file or checkpoint of a run, or None if its script finds none.

    Raises:
        OSError: The storage can't be read.
    """
    kept, checkpoint = newest_of_script(storage), newest_of_program(storage) if config.driver else None
    if kept and checkpoint:
        return replace(checkpoint, changed_at=max(kept.changed_at, checkpoint.changed_at))
    return checkpoint or kept


def has_stored(config: RunConfig, storage: RunStorage) -> bool:
    """Return whether the script finds files of the run when it starts again; a text file may be its state.

    Raises:
        OSError: The storage can't be read.
    """
    if newest_stored(config, storage) is not None:
        return True
    return any(name.endswith(".txt") or SETTINGS.search(name) for name in read_snapshot(storage).files)


def nothing_stored_line(run_name: str, command: str = "the same command") -> str:
    """Return the way on for a stopped run that has not stored a file."""
    return f"nothing is stored yet, so {command} with --run-name {run_name} starts from the beginning"


def newest_of_program(storage: RunStorage) -> Kept | None:
    """Return the newest file of a checkpoint that Ray Train or Ray Tune has stored, or None."""
    files: dict[str, datetime] = {}
    for name, info in storage.files(layout.RAY_FOLDER).items():
        is_of_checkpoint = any(folder.startswith("checkpoint_") for folder in name.split("/")[:-1])
        if is_of_checkpoint:
            files[name] = _time(info)
    newest = max(files, key=lambda name: files[name], default=None)
    return Kept(f"{layout.RAY_FOLDER}/{newest}", files[newest], files[newest]) if newest else None


def newest_of_script(storage: RunStorage) -> Kept | None:
    """Return the newest checkpoint of a Checkpointer, else the newest file of the last snapshot, or None."""
    checkpoint, file = _newest_checkpoint(storage), _newest_file(storage)
    newest = checkpoint or file
    if newest is None:
        return None
    changed_at = max(found[1] for found in (checkpoint, file) if found)
    return Kept(*newest, changed_at, is_loaded=checkpoint is not None)


def _newest_checkpoint(storage: RunStorage) -> tuple[str, datetime] | None:
    """Return the name and time of the newest complete checkpoint of a Checkpointer, in any folder of the run."""
    found: dict[str, dict[tuple[int, ...], tuple[str, datetime]]] = {}  # by the folder of a Checkpointer
    for top in storage.folders(""):
        files = {} if top in layout.NO_CHECKPOINTS else storage.files(top)
        for name, info in files.items():
            path, _, file = f"{top}/{name}".rpartition("/")
            folder, _, step = path.rpartition("/")
            order = layout.step_order(step)
            if file == layout.MANIFEST and order:
                found.setdefault(folder, {})[order] = (path, _time(info))
    newest = [checkpoints[max(checkpoints)] for checkpoints in found.values()]  # a Checkpointer resumes from it
    return max(newest, key=lambda checkpoint: checkpoint[1], default=None)


def _time(info: StoredFile) -> datetime:
    return datetime.fromtimestamp(info.mtime_ns / 1e9, UTC)


def _newest_file(storage: RunStorage) -> tuple[str, datetime] | None:
    """Return the name and time of the newest file of the last snapshot that is neither a log nor settings, or None."""
    files = {
        name: file.written_at
        for name, file in read_snapshot(storage).files.items()
        if file.key and not file.is_log and not is_log(name) and not SETTINGS.search(name)
    }
    newest = max(files, key=lambda name: files[name], default=None)
    return (newest, datetime.fromtimestamp(files[newest] / 1e9, UTC)) if newest else None
