"""Location of a script's checkpoints and exports, on a disk or in S3."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage.layout import CHECKPOINTS_FOLDER
from ray_on_ecs.storage.run_storage import RunStorage

# The run's folder in the storage, set by the runner.
RUN_VARIABLE = "RUN_URI"


def open_folder(folder: str | os.PathLike[str] | None) -> RunStorage:
    """Return a folder, by default `checkpoints`, without creating it; ValueError if it can't be one.

    A relative path is in the run's folder in the storage, and outside a run in the working directory.
    """
    return _open(_in_run(CHECKPOINTS_FOLDER if folder is None else folder), "folder")


def open_file(path: str | os.PathLike[str]) -> tuple[RunStorage, str]:
    """Return the folder of a file, as `open_folder` does, and the file's name."""
    folder, _, name = _in_run(path).rpartition("/")
    return _open(folder or "/.", "export"), name


def _in_run(path: str | os.PathLike[str]) -> str:
    text = os.path.expanduser(os.fspath(path))
    is_absolute = "://" in text or os.path.isabs(text)
    return text if is_absolute else f"{os.environ.get(RUN_VARIABLE) or Path.cwd()}/{text}"


def _open(path: str, argument: str) -> RunStorage:
    scheme, is_uri, key = path.partition("://")
    # In S3, a/./b would be another key than a/b.
    absolute = f"{scheme}://{posixpath.normpath(key)}" if is_uri else str(Path(path).absolute())
    parent, _, name = absolute.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ValueError(f"{argument}: {path!r} is not a folder; give the path of a folder, or s3://bucket/prefix")
    try:
        return RunStorage.open(parent or "/", name)
    except UsageError as cause:
        raise ValueError(f"{argument}: {str(cause).removeprefix('--storage-path: ')}") from cause
