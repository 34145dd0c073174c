"""The metrics of a run on its storage: a line for each record, never written again as a whole while the run trains.

On a disk new records are appended to `metrics.jsonl`. S3 can't append: there they are in parts `metrics/<number>.jsonl`
until the end of an attempt. A part has the records from its number on, counted from 0, in the place of those in
`metrics.jsonl`, and nothing follows the last part. So parts that are merged but not all deleted yet change nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

# Of the parts: the last one is written again until it is full.
PART_RECORDS = 5000
DELETE_THREADS = 16

Record = dict[str, Any]


class Records(Protocol):
    """The records of a run as they grow."""

    def take(self, begin: Callable[[int], int]) -> tuple[int, list[Record]]:
        """Return the records that have changed since the last call, and the number of the first.

        Args:
            begin: Returns the number from which on they are wanted, given that of the first that has changed.
        """
        ...

    def put_back(self, first: int) -> None:
        """Count the records from this number on as changed."""
        ...


class RecordFile:
    """Stores the records of one attempt.

    Args:
        storage: The run's folder.
    """

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        # On a disk: the number of records, and where in the file the last one begins and ends.
        self._count = self._last = self._end = 0
        # In S3.
        self._last_part = -1 if storage.is_local else max(_parts(storage), default=-1)

    def write(self, records: Records) -> None:
        """Store what is new.

        Raises:
            OSError: It could not be stored; the next call tries again.
        """
        first, new = records.take(self._begin)
        if not new:
            return
        try:
            (self._append if self._storage.is_local else self._write_parts)(first, new)
        except OSError:
            self._count = 0  # the file may be half written
            records.put_back(first)
            raise

    def _begin(self, changed: int) -> int:
        if not self._storage.is_local:
            return changed - changed % PART_RECORDS
        return changed if self._count and changed >= self._count - 1 else 0

    def _append(self, first: int, new: Sequence[Record]) -> None:
        lines = [_line(each) for each in new]
        content = "".join(lines).encode()
        begin = self._end if first == self._count else self._last if first else 0
        if first == 0:
            self._storage.write(layout.METRICS, content)
        elif begin + len(content) < self._end:  # a shorter record in the place of the last one
            before = self._storage.read(layout.METRICS)[:begin]
            self._storage.write(layout.METRICS, before + content)
        else:
            with Path(self._storage.path(layout.METRICS)).open("r+b") as file:
                file.seek(begin)
                file.write(content)
        self._count, self._end = first + len(new), begin + len(content)
        self._last = self._end - len(lines[-1].encode())

    def _write_parts(self, first: int, new: Sequence[Record]) -> None:
        """Write the parts from this number on, once those that follow it are deleted, the last one first."""
        for number in range(self._last_part, first, -PART_RECORDS):
            self._storage.delete(_part(number))
            self._last_part = number - PART_RECORDS
        for begin in range(0, len(new), PART_RECORDS):
            self._last_part = first + begin  # even if its answer is lost
            self._storage.write(_part(first + begin), "".join(map(_line, new[begin : begin + PART_RECORDS])))


def read_records(storage: RunStorage) -> list[Record]:
    """Read the records of a run's metrics, also while it trains; none if it has logged none.

    Raises:
        OSError: They can't be read.
        ValueError: A line is broken.
    """
    while True:
        with suppress(FileNotFoundError):  # a part that was merged, or is made again, in this moment
            parts = {} if storage.is_local else {number: _read(storage, _part(number)) for number in _parts(storage)}
            break
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
    """Write the whole `metrics.jsonl` and delete the parts, if there are some; return the records.

    Raises:
        OSError: It could not be done; the parts that are left hold.
    """
    records = read_records(storage)
    if not storage.is_local and (parts := _parts(storage)):
        storage.write_lines(layout.METRICS, records)
        with ThreadPoolExecutor(DELETE_THREADS) as threads:  # not the last one, after which nothing follows
            list(threads.map(lambda number: storage.delete(_part(number)), parts[:-1]))
        storage.delete_folder(layout.METRICS_PARTS)
    return records


def _parts(storage: RunStorage) -> list[int]:
    names = storage.file_sizes(layout.METRICS_PARTS)
    return sorted(int(name.removesuffix(".jsonl")) for name in names if re.fullmatch(r"\d{9}\.jsonl", name))


def _part(number: int) -> str:
    return f"{layout.METRICS_PARTS}/{number:09d}.jsonl"


def _read(storage: RunStorage, name: str) -> list[Record]:
    """Read the records of a file. A last line without an end is being written, or was when the command was killed."""
    return storage.read_parsed(name, lambda content: [json.loads(line) for line in content.split(b"\n")[:-1]])


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
