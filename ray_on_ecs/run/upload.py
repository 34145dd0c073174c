"""A user's code on the nodes of a cluster: Ray uploads its folder, without what git or `.rayignore` ignores.

Ray puts what it uploads on the import path of all its processes, where a user's `queue.py` would hide Python's. So it
uploads a folder that holds the user's under a name that can't be imported; the script alone starts in that.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import UsageError

# Never code.
EXCLUDES = (".git", ".venv", "__pycache__", "*.pyc")
IGNORE_FILES = (".gitignore", ".rayignore")
# Ray's own limit, for the packed folder.
MAX_BYTES = 512 * 2**20
SHOWN = 3
# The user's folder in Ray's working directory. The hyphen: not an identifier.
FOLDER = "working-dir"


@contextmanager
def runtime_env(folder: Path) -> Generator[dict[str, Any]]:
    """Yield Ray's runtime environment that brings a user's folder; Ray uploads it within the block.

    Raises:
        UsageError: The folder is too large.
    """
    check(folder)
    with tempfile.TemporaryDirectory(prefix="ray-upload-") as around:
        Path(around, FOLDER).symlink_to(folder.resolve(), target_is_directory=True)
        try:
            yield {"working_dir": around, "excludes": list(EXCLUDES)}
        except (RuntimeError, ValueError) as cause:
            if is_too_large(cause):
                raise too_large(folder) from cause
            raise


def check(folder: Path) -> None:
    """Check that a folder is not too large to be uploaded, unless something in it says what to leave out.

    Raises:
        UsageError: It is.
    """
    if not any((folder / name).exists() for name in IGNORE_FILES):
        sizes = _sizes(folder)
        if sum(sizes.values()) > MAX_BYTES:
            raise too_large(folder)


def is_too_large(cause: Exception) -> bool:
    """Return whether this is Ray's error for a folder that is too large."""
    return "exceeds the maximum size" in str(cause)


def too_large(folder: Path) -> UsageError:
    """Return the error for such a folder; it names what is largest in it."""
    sizes = _sizes(folder)
    largest = ", ".join(f"{name} ({size / 2**20:,.0f} MiB)" for name, size in sizes.most_common(SHOWN))
    size = f"{sum(sizes.values()) / 2**20:,.0f} MiB"
    return UsageError(
        f"--working-dir: {folder} has {size}, and {MAX_BYTES / 2**20:.0f} MiB can be uploaded; "
        f"the largest are {largest}: name what is no code in .rayignore or .gitignore, and give data as --input"
    )


def _sizes(folder: Path) -> Counter[str]:
    """Return the bytes of each entry of a folder."""
    sizes: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in EXCLUDES]
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                sizes[path.relative_to(folder).parts[0]] += path.stat().st_size
    return sizes
