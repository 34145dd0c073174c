"""Checkpoint index: atomic commit, discovery and retention.

A checkpoint is a folder `step-<number>`, the second one after a step `step-<number>-1`. It is complete once it has its
manifest, `checkpoint.json`, which is written last and has the size and SHA-256 of each file. One without manifest is
absent; it is deleted after the next commit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from ray_on_ecs.checkpoint.manifest import FileRecord
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.tracking.layout import MANIFEST
from ray_on_ecs.tracking.storage import RunStorage

PREFIX = "step-"
FORMAT = 1

BestMode = Literal["min", "max"]


class Manifest(TypedDict):
    """The manifest of a checkpoint.

    Attributes:
        format: The format of the folder.
        step: Optimizer steps before it.
        epoch: Epochs before it.
        metrics: The metrics of the epoch that it ends, if it ends one.
        world_size: The number of ranks that saved it.
        config: The settings of the training.
        gradients: The parameters in the order in which DDP had their first gradients, see ddp_buckets.py.
        files: Its files by name.
    """

    format: int
    step: int
    epoch: int
    metrics: dict[str, float]
    world_size: int
    config: dict[str, Any]
    gradients: list[str]
    files: dict[str, FileRecord]


class CheckpointIndex:
    """The checkpoints of a folder, as rank 0 sees them.

    Args:
        storage: The folder.
        keep_last: The number of newest checkpoints that are kept.
        keep_best: The metric whose best checkpoint is kept as well.
        best_mode: Whether its least or its greatest value is the best.
        say: Called with a line for each checkpoint that can't be deleted.
    """

    def __init__(
        self,
        storage: RunStorage,
        keep_last: int,
        keep_best: str | None,
        best_mode: BestMode,
        say: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._sign = 1 if best_mode == "max" else -1
        self._say = say
        self._complete: dict[str, Manifest] = {}
        self._incomplete: set[str] = set()
        for name in storage.folders(PREFIX):
            if manifest := self._read(name):
                self._complete[name] = manifest
            else:
                self._incomplete.add(name)

    @property
    def newest(self) -> tuple[str, Manifest] | None:
        """The newest complete checkpoint."""
        return max(self._complete.items(), default=None, key=lambda each: each[0])

    @property
    def best(self) -> tuple[str, Manifest] | None:
        """The complete checkpoint with the best metric, the earliest of several."""
        scored = [each for each in sorted(self._complete.items()) if self._score(each[1]["metrics"]) is not None]
        return max(scored, key=lambda each: self._score(each[1]["metrics"]) or 0.0, default=None)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics are better than those of all checkpoints."""
        score = self._score(metrics)
        best = self.best
        known = self._score(best[1]["metrics"]) if best else None
        return score is not None and (known is None or score > known)

    def new_name(self, step: int) -> str:
        """Return a folder for another checkpoint after a step; one that is complete stays so until the commit."""
        known = {*self._complete, *self._incomplete}
        names = (f"{PREFIX}{step:09d}{f'-{number}' if number else ''}" for number in itertools.count())
        return next(name for name in names if name not in known)

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make a checkpoint complete, and delete those that need not be kept.

        Raises:
            OSError: The storage has not every byte of it, or can't be written.
        """
        found = self._storage.file_sizes(name)
        for file, record in manifest["files"].items():
            if found.get(file) != record["bytes"]:  # an S3 other than AWS's may keep the marks between chunks
                raise OSError(f"{name}/{file} has {found.get(file, 0):,} of {record['bytes']:,} bytes")
        self._storage.write_json(f"{name}/{MANIFEST}", manifest)
        self._incomplete.discard(name)
        self._complete[name] = manifest
        self._prune()

    def end(self) -> None:
        """Keep the newest checkpoint and the best alone: the training has ended well."""
        self._keep_last = 1
        self._prune()

    def begin(self, name: str) -> None:
        """Note that a checkpoint is being written: until the commit it is absent."""
        self._incomplete.add(name)

    def discard(self, name: str) -> None:
        """Pass over a damaged checkpoint; it is deleted after the next commit."""
        self._complete.pop(name, None)
        self._incomplete.add(name)

    def _prune(self) -> None:
        """Delete what is incomplete, and what is neither among the newest nor the best; or else the next time.

        Of several after one step the last one stays.
        """
        last = {self._complete[name]["step"]: name for name in sorted(self._complete)}
        kept = set(list(last.values())[-self._keep_last :])
        if best := self.best:
            kept.add(last[best[1]["step"]])
        for name in sorted({*self._incomplete, *self._complete} - kept):
            try:
                self._storage.delete(f"{name}/{MANIFEST}")  # first: one that is half deleted is absent
                self._storage.delete_folder(name)
            except OSError as cause:
                self._say(f"{name} could not be deleted ({short_reason(cause)})")
                return
            self._complete.pop(name, None)
            self._incomplete.discard(name)

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric of `keep_best`, such that greater is better; None where there is none."""
        value = metrics.get(self._keep_best) if self._keep_best else None
        return None if value is None else self._sign * value

    def _read(self, name: str) -> Manifest | None:
        try:
            manifest = json.loads(self._storage.read(f"{name}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return None
        return manifest if manifest.keys() >= Manifest.__annotations__.keys() else None
