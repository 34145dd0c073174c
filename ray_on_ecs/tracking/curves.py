"""Curves of a run's metrics for a page of many runs: records that are spread evenly over all that the run has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray_on_ecs.rules import finite
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import Changed, StoredFile
from ray_on_ecs.storage.run_storage import RunStorage, parse_json
from ray_on_ecs.tracking.records import STEP, Record, part_files
from ray_on_ecs.tracking.starts import moment

MAX_CURVES = 12  # of a run: a program of RLlib has hundreds of metrics
# Files up to this size in total are read whole, and of larger ones so many slices, which have this size together.
WHOLE_BYTES, SLICES = 2**19, 16
SLICE_BYTES = WHOLE_BYTES // SLICES
DIGITS, LARGE = 4, 1e15


@dataclass(frozen=True)
class Curves:
    """Rows of a run's metrics: the steps, the seconds since the first record, and the values of each metric.

    A value is None where the row has none, or none that is finite.
    """

    steps: list[float] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    last: dict[str, float | None] = field(default_factory=dict)  # of each metric; None if it was not finite


def sample(storage: RunStorage, files: Mapping[str, StoredFile], *, is_whole: bool = False) -> list[Record]:
    """Return the records of a run, of large files those in slices, in their order; OSError if they can't be read.

    As in `records.py`, the parts replace the records of `metrics.jsonl` from their first one on, here by its step. They
    are gone before a run has its result.

    Args:
        storage: The run's folder.
        files: Its files, by name.
        is_whole: Large files are read whole.
    """
    parts = {} if layout.RESULT in files else part_files(storage)
    merged = [files[layout.METRICS]] if layout.METRICS in files and min(parts, default=1) else []
    size = sum(file.size for file in (*merged, *parts.values()))

    def read(file: StoredFile) -> list[Record]:
        slices = 1 if is_whole or size <= WHOLE_BYTES else max(SLICES * file.size // size, 2)
        return [record for line in _lines(storage, file, slices) if (record := _parsed(line))]

    newer = [record for file in parts.values() for record in read(file)]
    first = newer[0][STEP] if newer else math.inf
    return [record for file in merged for record in read(file) if record[STEP] < first] + newer


def thin(records: Sequence[Record], points: int) -> Curves:
    """Return the curves of records, which have a step each, with up to so many points (2 or more) of each metric.

    Metrics of other steps than each other's add their rows: up to MAX_CURVES times as many as points.
    """
    last: dict[str, float | None] = {}
    rows_of: dict[str, list[int]] = {}  # with a finite value, by metric
    for row, record in enumerate(records):
        for name, value in record.items():
            if name in (STEP, "time") or isinstance(value, bool) or not isinstance(value, int | float | None):
                continue
            last[name] = _rounded(value)
            if last[name] is not None:
                rows_of.setdefault(name, []).append(row)
    names = sorted(last, key=lambda name: "loss" not in name.lower())[:MAX_CURVES]
    chosen = sorted({row for name in names for row in _evenly(rows_of.get(name, []), points)})
    rows = [records[row] for row in chosen]
    times = [moment(row.get("time")) for row in rows]
    begin = min((time for time in times if time is not None), default=0.0)
    return Curves(
        steps=[row[STEP] for row in rows],
        seconds=[None if time is None else _rounded(time - begin) for time in times],
        values={name: [_rounded(row.get(name)) for row in rows] for name in names if name in rows_of},
        last={name: last[name] for name in names},
    )


def _evenly(rows: Sequence[int], most: int) -> Sequence[int]:
    """Return up to so many of the rows, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[number * (len(rows) - 1) // (most - 1)] for number in range(most)]


def _rounded(value: Any) -> float | None:
    """Return a finite number in few digits; None for anything else."""
    if isinstance(value, bool) or finite(value) is None:
        return None
    number = float(f"{value:.{DIGITS}g}")
    if math.isinf(number):  # the largest floats are rounded up to it
        return None
    return int(number) if number.is_integer() and abs(number) < LARGE else number


def _lines(storage: RunStorage, file: StoredFile, slices: int) -> Iterator[bytes]:
    """Return the lines in so many slices, at both ends and between; all of them for one slice, or of a small file."""
    with suppress(FileNotFoundError, Changed):  # merged or rewritten since it was listed
        if slices == 1 or file.size <= slices * SLICE_BYTES:
            yield from storage.store.read(file.path).split(b"\n")
            return
        for number in range(slices):
            start = (file.size - SLICE_BYTES) * number // (slices - 1)
            yield from storage.store.read(file.path, start, SLICE_BYTES).split(b"\n")  # a part of one is not JSON


def _parsed(line: bytes) -> Record | None:
    """Return a record with a step; None for another line: others may have written it."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    step = record.get(STEP) if isinstance(record, dict) else None
    return None if isinstance(step, bool) or finite(step) is None else record
