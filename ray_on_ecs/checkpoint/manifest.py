"""Sizes and SHA-256 of a checkpoint's files, and their verification."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

from ray_on_ecs.storage.run_storage import RunStorage

# Files are read in chunks of this size.
CHUNK_BYTES = 16 * 2**20

Heartbeat = Callable[[], None]


class FileRecord(TypedDict):
    """Size of a file, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


def find_fault(
    storage: RunStorage,
    name: str,
    records: Mapping[str, FileRecord],
    files: Iterable[str],
    heartbeat: Heartbeat,
) -> str | None:
    """Verify some of a checkpoint's files; returns a description of the first damage, or None."""
    for file in files:
        size = 0
        digest = hashlib.sha256()
        try:
            with storage.open_reader(f"{name}/{file}") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    heartbeat()
                    size += len(chunk)
                    digest.update(chunk)
        except FileNotFoundError:
            return f"{file} is missing"
        expected = records[file]
        if size != expected["bytes"]:
            return f"{file} has {size:,} of {expected['bytes']:,} bytes"
        if digest.hexdigest() != expected["sha256"]:
            return f"{file} has another SHA-256"
    return None
