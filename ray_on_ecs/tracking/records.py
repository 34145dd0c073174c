"""Metrics of a run in its storage: a line per record, in numbered parts while an attempt trains.

S3 objects can't be appended to, so that new records are in parts `metrics/<number>.jsonl` until the end of an attempt,
when they are merged into `metrics.jsonl`. A part's name is the index of its first record. Its records replace the ones
of the same indices in `metrics.jsonl`, and nothing follows the last part. So a merge whose parts are not all deleted
yet changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import StoredFile
from ray_on_ecs.storage.run_storage import RunStorage, parse_json

# The metric that is the number of the step.
STEP = "step"
# Names that a record has for itself.
RESERVED = (STEP, "time")
PART_RECORDS = 5000
DELETE_THREADS = 16

Record = dict[str, Any]


class Records(Protocol):
    """Growing list of a run's records."""

    def take(self, begin: Callable[[int], int]) -> tuple[int, list[Record]]:
        """Return the records that have changed since the last call, and the index of the first.

        `begin` maps the index of the first changed record to the index of the first one to return.
        """
        ...

    def put_back(self, first: int) -> None:
        """Count the records from this index on as changed."""
        ...


class RecordFile:
    """Stores the records of one attempt in parts; only the last part is rewritten, until it is full."""

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._last_part = max(part_files(storage), default=-1)

    def write(self, records: Records) -> None:
        """Store the new and changed records; after an OSError the next call tries again."""
        first, new = records.take(_part_of)
        if not new:
            return
        try:
            for number in range(self._last_part, first, -PART_RECORDS):  # outdated ones, the last one first
                self._storage.delete(_part(number))
                self._last_part = number - PART_RECORDS
            for begin in range(0, len(new), PART_RECORDS):
                self._last_part = first + begin  # before the write, which may succeed although its response is lost
                self._storage.write_lines(_part(first + begin), new[begin : begin + PART_RECORDS])
        except OSError:
            records.put_back(first)
            raise


def read_records(storage: RunStorage) -> list[Record]:
    """Read the records of a run's metrics, also while it trains; ValueError if a line is broken."""
    while True:
        try:
            parts = {number: _read(storage, _part(number)) for number in part_files(storage)}
            break
        except FileNotFoundError:  # merged or rewritten since it was listed
            continue
    try:
        records = _read(storage, layout.METRICS)
    except FileNotFoundError:
        records = []
    for number, part in parts.items():
        records[number : number + len(part)] = part
        if number == max(parts):
            del records[number + len(part) :]
    return records


def merge_records(storage: RunStorage) -> list[Record]:
    """Merge the parts into `metrics.jsonl` and delete them; return the records. An OSError leaves valid parts."""
    records = read_records(storage)
    parts = list(part_files(storage))
    if parts:
        storage.write_lines(layout.METRICS, records)
        # The last part goes last: readers drop the records behind the last part that is there.
        with ThreadPoolExecutor(DELETE_THREADS) as threads:
            list(threads.map(lambda number: storage.delete(_part(number)), parts[:-1]))
        storage.delete_folder(layout.METRICS_PARTS)
    return records


def part_files(storage: RunStorage) -> dict[int, StoredFile]:
    """Return the parts by their numbers, in order."""
    files = storage.listing(layout.METRICS_PARTS).files
    return {int(name[:9]): files[name] for name in sorted(files) if re.fullmatch(r"\d{9}\.jsonl", name, re.ASCII)}


def _part(number: int) -> str:
    return f"{layout.METRICS_PARTS}/{number:09d}.jsonl"


def _part_of(index: int) -> int:
    """Return the number of the part that has a record."""
    return index - index % PART_RECORDS


def _read(storage: RunStorage, name: str) -> list[Record]:
    return [parse_json(line) for line in storage.read(name).splitlines()]
