"""Record of the files of a node's disk that are stored as they are, for the next worker on the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ray_on_ecs.run.files.scan import FileState
from ray_on_ecs.storage.snapshot import KeptFile

KNOWN = "stored.json"


def write(root: Path, known: Mapping[str, tuple[KeptFile, FileState]]) -> None:
    """Write the record; without one the next worker fetches all files."""
    with suppress(OSError):
        new = root / f"{KNOWN}.new"
        new.write_text(json.dumps({name: [asdict(file), state] for name, (file, state) in known.items()}))
        new.replace(root / KNOWN)


def read(root: Path) -> dict[str, tuple[KeptFile, FileState]]:
    """Return the files of the record with their states; nothing if another version has written it."""
    with suppress(AttributeError, OSError, TypeError, ValueError):
        known = json.loads((root / KNOWN).read_text())
        return {name: (KeptFile(**file), FileState(*state)) for name, (file, state) in known.items()}
    return {}
