"""The checkpoints in a run's folder: stored whole or not at all, found again, and few.

A checkpoint is whole once its `checkpoint.json` is there, which is written last and says how long each file is and what
its SHA-256 is. One that isn't, or whose files are others, is passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.checkpoint.snapshot import FILES, Snapshot
from training.run import layout
from training.run.storage import RunStorage, short_reason

Manifest = dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: The run's folder.
        keep: How many are kept besides the best one.
        score: The metric that decides which is the best; higher is better.
        say: Told of a checkpoint that is passed over.
    """

    def __init__(self, storage: RunStorage, keep: int = 1, score: str = "", say: Callable[[str], None] = print) -> None:
        self._storage, self._keep, self._score, self._say = storage, keep, score, say
        self._whole: dict[str, Manifest] = {}
        self._remains: list[str] = []
        for name in storage.folders(layout.CHECKPOINT_PREFIX):
            if manifest := self._manifest(name):
                self._whole[name] = manifest
            else:
                self._remains.append(name)

    @property
    def names(self) -> list[str]:
        """The checkpoints that were stored whole, the newest last."""
        return sorted(self._whole)

    @property
    def best(self) -> str | None:
        """The one of the epoch with the highest score, the earliest of several."""
        tested = [name for name in self.names if self._score_of(name) is not None]
        return max(tested, key=lambda name: self._score_of(name) or 0.0, default=None)

    def epochs(self, name: str) -> int:
        """How many epochs had been finished before a checkpoint."""
        return self._whole[name]["epochs"]

    def put(self, snapshot: Snapshot, folder: Path) -> str:
        """Store a checkpoint and delete those that need not be kept; its name.

        Args:
            snapshot: What it is written from.
            folder: An empty folder of this machine.

        Raises:
            OSError: It could not be stored; those before are as they were.
        """
        snapshot.write(folder)
        name = f"{layout.CHECKPOINT_PREFIX}{snapshot.step:08d}"
        files = {each: {"bytes": (folder / each).stat().st_size, "sha256": _sha256(folder / each)} for each in FILES}
        manifest = {
            "step": snapshot.step,
            "epochs": len(snapshot.history),
            "score": snapshot.history[-1][self._score] if snapshot.ended else None,
            "files": files,
        }
        self._storage.delete(f"{name}/{layout.MANIFEST}")  # of another try: from here on it is not whole
        self._remains.append(name)
        for each in FILES:
            self._storage.upload(folder / each, f"{name}/{each}")
        self._storage.write_json(f"{name}/{layout.MANIFEST}", manifest)
        self._whole[name] = manifest
        self._prune()
        return name

    def fetch(self, folder: Path) -> tuple[str, Manifest] | None:
        """Fetch the newest whole checkpoint into a folder of this machine; its name and manifest."""
        for name in reversed(self.names):
            manifest = self._whole[name]
            if (fault := fetch(self._storage, name, manifest, folder)) is None:
                return name, manifest
            self._say(f"{name} is not whole ({fault}); passing it over")
            del self._whole[name]
            self._remains.append(name)
        return None

    def _manifest(self, name: str) -> Manifest | None:
        try:
            manifest = json.loads(self._storage.read(f"{name}/{layout.MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        return manifest if isinstance(manifest, dict) and set(manifest.get("files", ())) == set(FILES) else None

    def _score_of(self, name: str) -> float | None:
        return self._whole[name]["score"]

    def _prune(self) -> None:
        """Delete what is neither among the last nor the best, and what is not whole; if not now, the next time."""
        best, self._remains = self.best, [name for name in self._remains if name not in self._whole]
        for name in [*self._remains, *(name for name in self.names[: -self._keep] if name != best)]:
            try:
                self._storage.delete(f"{name}/{layout.MANIFEST}")  # first: what is half deleted is not whole
                self._storage.delete_folder(name)
            except OSError as cause:
                self._say(f"{name} could not be deleted ({short_reason(cause)})")
                return
            self._whole.pop(name, None)
        self._remains = []


def fetch(storage: RunStorage, name: str, manifest: Manifest, folder: Path) -> str | None:
    """Fetch a checkpoint into a folder of this machine; what is wrong with it, or None."""
    for each, expected in manifest["files"].items():
        file = folder / each
        try:
            storage.download(f"{name}/{each}", file)
        except FileNotFoundError:
            return f"{each} is missing"
        if (found := file.stat().st_size) != expected["bytes"]:
            return f"{each} has {found:,} of {expected['bytes']:,} bytes"
        if _sha256(file) != expected["sha256"]:
            return f"{each} holds something else"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
