"""Folders on a node's own disk, for what its processes share."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path


def node_folder(kind: str, key: str) -> Path:
    """Return a folder's path, which need not exist; the same for all processes of a node.

    Args:
        kind: What it is for, such as `inputs`.
        key: What tells it from others of its kind; a hash of this is its name.
    """
    return Path(tempfile.gettempdir()) / f"training-{kind}" / hashlib.sha256(key.encode()).hexdigest()[:16]
