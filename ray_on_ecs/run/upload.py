"""A user's code on the nodes of a cluster: Ray uploads its folder, without what git or `.rayignore` ignores."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import UsageError

# Never code.
EXCLUDES = (".git", ".venv", "__pycache__", "*.pyc")
IGNORE_FILES = (".gitignore", ".rayignore")
# Ray's own limit, for the packed folder.
MAX_BYTES = 512 * 2**20
SHOWN = 3


def runtime_env(folder: Path) -> dict[str, Any]:
    """Return Ray's runtime environment with a folder as the working directory.

    Raises:
        UsageError: The folder is too large, and nothing in it says what to leave out.
    """
    if not any((folder / name).exists() for name in IGNORE_FILES):
        sizes = _sizes(folder)
        if sum(sizes.values()) > MAX_BYTES:
            raise too_large(folder)
    return {"working_dir": str(folder), "excludes": list(EXCLUDES)}


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
