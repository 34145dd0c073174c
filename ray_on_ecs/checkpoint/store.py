"""The checkpoints in a run's folder: complete or not at all, found again, and few.

A checkpoint is complete once it has its manifest, `checkpoint.json`, which is written last and says how long each file
is and what its SHA-256 is. An incomplete one, or one whose files differ from that, is passed over for the one before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ray_on_ecs.checkpoint.manifest import FileRecord, Heartbeat, Manifest
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import: not before the first checkpoint
    from ray_on_ecs.checkpoint.snapshot import Part, Snapshot


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: The run's folder.
        keep: How many are kept in addition to the best one.
        score: The metric that decides which is the best; higher is better.
        log: Called with a line for each checkpoint that is passed over or can't be deleted.
    """

    def __init__(self, storage: RunStorage, keep: int = 1, score: str = "", log: Callable[[str], None] = print) -> None:
        self._storage = storage
        self._keep = keep
        self._score = score
        self._log = log
        self._complete: dict[str, Manifest] = {}
        self._incomplete: set[str] = set()
        for name in storage.folders(layout.CHECKPOINT_PREFIX):
            if manifest := self._read_manifest(name):
                self._complete[name] = manifest
            else:
                self._incomplete.add(name)

    @property
    def names(self) -> list[str]:
        """The complete checkpoints, the newest last."""
        return sorted(self._complete)

    @property
    def newest(self) -> tuple[str, Manifest] | None:
        """The newest complete checkpoint."""
        return max(self._complete.items(), default=None)

    @property
    def best(self) -> str | None:
        """The checkpoint of the epoch with the highest score, the earliest of several."""
        tested = [name for name in self.names if self._complete[name]["score"] is not None]
        return max(tested, key=lambda name: self._complete[name]["score"] or 0.0, default=None)

    def epochs(self, name: str) -> int:
        """Return how many epochs had been finished before a checkpoint."""
        return self._complete[name]["epochs"]

    def score(self, snapshot: Snapshot) -> float | None:
        """Return the score of the epoch that a snapshot ends, if it ends one."""
        return snapshot.history[-1][self._score] if snapshot.ends_epoch else None

    def complete(self, snapshot: Snapshot, parts: list[Part | str], data: Mapping[str, Any]) -> None:
        """Make a checkpoint of the ranks' parts, and delete those that need not be kept.

        Args:
            snapshot: What rank 0 has of it.
            parts: For each rank what it has written, or why it couldn't.
            data: What the manifest says of the data set.

        Raises:
            OSError: It could not be stored; those before are as they were.
        """
        name = snapshot.name
        self._incomplete.add(name)
        for part in parts:
            if isinstance(part, str):
                raise OSError(part)
        files = snapshot.write_metadata(self._storage, [part for part in parts if not isinstance(part, str)])
        self._check_sizes(name, files)
        manifest: Manifest = {
            "step": snapshot.step,
            "epochs": len(snapshot.history),
            "score": self.score(snapshot),
            "world_size": len(parts),
            "data": dict(data),
            "files": files,
        }
        self._storage.write_json(f"{name}/{layout.MANIFEST}", manifest)
        self._incomplete.discard(name)
        self._complete[name] = manifest
        self._prune()

    def discard(self, name: str, reason: str = "") -> None:
        """Make a checkpoint incomplete, and say why if there is a reason.

        Raises:
            OSError: It could not be done.
        """
        if reason:
            self._log(f"{name} is not complete ({reason}); passing it over")
        self._complete.pop(name, None)
        self._incomplete.add(name)
        self._storage.delete(f"{name}/{layout.MANIFEST}")

    def _prune(self) -> None:
        """Delete what is incomplete, and what is neither among the newest nor the best; or else the next time."""
        superfluous = [name for name in self.names[: -self._keep] if name != self.best]
        for name in [*sorted(self._incomplete), *superfluous]:
            try:
                self.discard(name)  # first: what is half deleted is incomplete
                self._storage.delete_folder(name)
            except OSError as cause:
                self._log(f"{name} could not be deleted ({short_reason(cause)})")
                return
            self._incomplete.discard(name)

    def export(self, name: str, file: str, heartbeat: Heartbeat) -> None:
        """Write the weights of a checkpoint to a file, as a plain state_dict.

        Raises:
            OSError: They could not be read or written.
        """
        import torch  # takes a second, which a script should not wait for

        from ray_on_ecs.checkpoint.snapshot import load_weights

        weights = load_weights(self._storage, name, heartbeat)
        with self._storage.replace(file) as stream:
            torch.save(weights, stream)

    def _read_manifest(self, name: str) -> Manifest | None:
        try:
            manifest = json.loads(self._storage.read(f"{name}/{layout.MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        return manifest if isinstance(manifest, dict) and manifest.get("files") else None

    def _check_sizes(self, name: str, files: Mapping[str, FileRecord]) -> None:
        """See that the storage has every byte: an S3 other than AWS's may keep the marks between a stream's chunks."""
        found = self._storage.file_sizes(name)
        for file, record in files.items():
            if found.get(file) != record["bytes"]:
                raise OSError(f"{name}/{file} has {found.get(file, 0):,} of {record['bytes']:,} bytes")
