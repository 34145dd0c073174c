"""Checkpoint index: atomic commit, discovery, verification and retention.

A checkpoint is a folder `step-<number>`; a second one after the same step is `step-<number>-1`. It is complete once it
has a manifest, `checkpoint.json`, which is written last and lists the size and SHA-256 of each file. A folder without a
manifest counts as absent, and is deleted before the next save.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypedDict, cast

from ray_on_ecs import sdk
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.layout import MANIFEST, step_order
from ray_on_ecs.storage.run_storage import RunStorage

PREFIX = "step-"
# A checkpoint of another format is refused and stays; one whose manifest lacks a key is deleted.
FORMAT = 1
CHUNK_BYTES = 16 * 2**20  # of a read

BestMode = Literal["min", "max"]


class FileRecord(TypedDict):
    """Size of a file, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """Manifest of a checkpoint."""

    format: int  # version of the folder's format
    step: int  # completed optimizer steps
    epoch: int  # completed epochs
    metrics: dict[str, float]  # those of an epoch that ends with this step; else empty
    world_size: int  # the number of ranks that saved it
    config: dict[str, Any]  # the settings of the training
    left_out: int  # the number of frozen parameters that it lacks
    files: dict[str, FileRecord]  # by name


class Progress(NamedTuple):
    """Completed steps and epochs of a checkpoint; zeros without one."""

    step: int = 0
    epoch: int = 0


class CheckpointIndex:
    """Checkpoints of a folder, on rank 0; the arguments are those of `Checkpointer`."""

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
        # Name and format of a checkpoint of another version of this package.
        self.unreadable: tuple[str, int] | None = None
        for name in filter(step_order, storage.folders(PREFIX)):
            manifest = self._read(name)
            if manifest is None:
                self._incomplete.add(name)
            elif manifest["format"] != FORMAT:
                self.unreadable = (name, manifest["format"])
            else:
                self._complete[name] = manifest

    @property
    def newest(self) -> tuple[str, Manifest] | None:
        """The newest complete checkpoint."""
        name = max(self._complete, key=step_order, default=None)
        return (name, self._complete[name]) if name else None

    @property
    def best(self) -> tuple[str, Manifest] | None:
        """The complete checkpoint with the best metric; the earliest of equal ones.

        One that lacks weights of the newest, which have been trained since, could not be loaded.
        """
        least = self.newest[1]["left_out"] if self.newest else 0
        complete = [name for name, each in self._complete.items() if each["left_out"] <= least]
        in_order = sorted(complete, key=step_order)
        scores = {name: self._score(self._complete[name]["metrics"]) for name in in_order}
        name = max(in_order, key=lambda name: scores[name], default=None)
        return (name, self._complete[name]) if name and scores[name] > -math.inf else None

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return True if metrics are better than the metrics of all checkpoints."""
        best = self.best
        return self._score(metrics) > (self._score(best[1]["metrics"]) if best else -math.inf)

    def new_name(self, step: int) -> str:
        """Return a new folder name; an existing checkpoint after the same step stays complete until the commit."""
        base = name = f"{PREFIX}{step:09d}"
        number = 0
        while name in self._complete or name in self._incomplete:
            number += 1
            name = f"{base}-{number}"
        return name

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make a checkpoint complete, and delete those outside the retention; OSError for an incomplete file."""
        sizes = self._storage.file_sizes(name)
        for file, record in manifest["files"].items():
            # Some S3-compatible stores keep the chunk signatures of a streamed upload in the object.
            if sizes.get(file) != record["bytes"]:
                raise OSError(f"{name}/{file} has {sizes.get(file, 0):,} of {record['bytes']:,} bytes")
        self._storage.write_json(f"{name}/{MANIFEST}", manifest)
        self._incomplete.discard(name)
        before, self._complete[name] = self.best, manifest
        if before and before[1]["left_out"] > manifest["left_out"]:
            line = "parameters that it lacks, as save_frozen is False, have changed"
            self._say(f"{before[0]} is no longer the best checkpoint: {line}; the best is chosen from {name} on")
        self._prune()

    def end(self) -> None:
        """Keep only the newest checkpoint and the best one: the training has finished."""
        self._keep_last = 1
        self._prune()

    def discard(self, name: str) -> None:
        """Count a checkpoint as absent: one that is being written, until its commit, or a damaged one."""
        self._complete.pop(name, None)
        self._incomplete.add(name)

    def clean(self) -> None:
        """Delete what is left of failed saves and of earlier starts; the next call repeats a failed deletion.

        Damaged checkpoints, which have a manifest, stay until the next commit, and no name is used again before it.
        """
        with suppress(OSError):
            for name in sorted(self._incomplete):
                if not self._storage.exists(f"{name}/{MANIFEST}"):
                    self._storage.delete_folder(name)

    def _prune(self) -> None:
        """Delete incomplete checkpoints, and complete ones that are neither among the newest nor the best.

        The last one of several after the same step is retained. The next call repeats a failed deletion.
        """
        last_of_step = {self._complete[name]["step"]: name for name in sorted(self._complete, key=step_order)}
        retained = set(list(last_of_step.values())[-self._keep_last :])
        best = self.best
        if best is not None:
            retained.add(last_of_step[best[1]["step"]])
        for name in sorted({*self._incomplete, *self._complete} - retained):
            try:
                self._storage.delete(f"{name}/{MANIFEST}")  # first, so that a partly deleted checkpoint is absent
                self._storage.delete_folder(name)
            except OSError as cause:
                self._say(f"{name} could not be deleted ({short_reason(cause)})")
                return
            self._complete.pop(name, None)
            self._incomplete.discard(name)

    def _score(self, metrics: Mapping[str, float]) -> float:
        """Return the metric of `keep_best`, negated for `min`; the lowest number without that metric."""
        value = metrics.get(self._keep_best or "")
        return -math.inf if value is None else self._sign * value

    def _read(self, name: str) -> Manifest | None:
        """Read a manifest, which may be of another format; None if it is missing or broken."""
        try:
            manifest = json.loads(self._storage.read(f"{name}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            return None
        if manifest["format"] == FORMAT and not manifest.keys() >= Manifest.__required_keys__:
            return None
        return cast("Manifest", manifest)


def find_fault(storage: RunStorage, name: str, records: Mapping[str, FileRecord], files: Iterable[str]) -> str | None:
    """Verify some of a checkpoint's files; returns a description of the first damage, or None."""
    for file in files:
        size = 0
        digest = hashlib.sha256()
        try:
            with storage.open_reader(f"{name}/{file}") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    sdk.alive()
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


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values; other types become a string that is the same in each process."""
    return {str(name): _json(value) for name, value in settings.items()}


def differences(previous: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the settings that differ, with both values; empty if they are equal."""
    changes = []
    for name in {**previous, **current}:
        old = json.dumps(previous[name]) if name in previous else "not set"
        new = json.dumps(current[name]) if name in current else "not set"
        if previous.get(name, ...) != current.get(name, ...):
            changes.append(f"{name} was {old} and is {new}")
    return ", ".join(changes)


def _json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return as_json(value)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_json(item) for item in value), key=str)
    if hasattr(value, "__qualname__"):  # a function or a class
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    if " at 0x" in text:  # the default repr, with an address that differs between processes
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return text
