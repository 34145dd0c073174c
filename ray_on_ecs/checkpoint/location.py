"""The folders and files that a script names, on a disk or in S3."""

from __future__ import annotations

import os
from pathlib import Path

from ray_on_ecs.errors import UsageError
from ray_on_ecs.tracking.layout import CHECKPOINTS_FOLDER
from ray_on_ecs.tracking.storage import RunStorage

# The run's folder in the storage, set by the runner.
RUN_VARIABLE = "RUN_URI"


def open_folder(folder: str | os.PathLike[str] | None) -> RunStorage:
    """Return a folder, by default `checkpoints`; a relative path is in the run's folder in the storage.

    Nothing is created.

    Raises:
        ValueError: It can't be used.
    """
    return _open(_in_run(CHECKPOINTS_FOLDER if folder is None else os.fspath(folder)), "folder")


def open_file(path: str | os.PathLike[str]) -> tuple[RunStorage, str]:
    """Return the folder of a file, and the file's name; a relative path is in the run's folder in the storage.

    Raises:
        ValueError: It can't be used.
    """
    folder, _, name = _in_run(os.fspath(path)).rpartition("/")
    return _open(folder or "/.", "export"), name


def _in_run(path: str) -> str:
    """Return a path in the run's folder in the storage; outside a run, in the working directory."""
    path = path if "://" in path else os.path.expanduser(path)
    if "://" in path or os.path.isabs(path):
        return path
    return f"{os.environ.get(RUN_VARIABLE) or Path.cwd()}/{path}"


def _open(address: str, argument: str) -> RunStorage:
    where = address.rstrip("/") if "://" in address else str(Path(address).absolute())
    parent, _, name = where.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ValueError(f"{argument}: {address!r} is not a folder; give one, or s3://bucket/prefix")
    try:
        return RunStorage.open(parent or "/", name)
    except UsageError as cause:
        raise ValueError(f"{argument}: {str(cause).removeprefix('--storage-path: ')}") from cause


def is_in_run() -> bool:
    """Return whether the runner has started this script."""
    return RUN_VARIABLE in os.environ
