"""The files of a checkpoint: their sizes and hashes, and the check that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

from ray_on_ecs.tracking.storage import RunStorage

# Files are read in chunks of this size.
CHUNK_BYTES = 16 * 2**20

Heartbeat = Callable[[], None]


class FileRecord(TypedDict):
    """What a manifest says of a file: its size and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


def find_fault(
    storage: RunStorage,
    name: str,
    records: Mapping[str, FileRecord],
    files: Iterable[str],
    heartbeat: Heartbeat,
) -> str | None:
    """Read some of a checkpoint's files; returns what is wrong with them, or None."""
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
            return f"{file} holds something else"
    return None
