"""Folders on a node's disk that its processes share."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path


def node_folder(kind: str, key: str) -> Path:
    """Return the path of a folder, which need not exist; equal in all processes of a node.

    Args:
        kind: The purpose, such as `inputs`.
        key: The identity among folders of this kind; its hash is the folder's name.
    """
    return Path(tempfile.gettempdir()) / f"training-{kind}" / hashlib.sha256(key.encode()).hexdigest()[:16]
