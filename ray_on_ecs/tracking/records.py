"""Metrics of a run in its storage: a line per record, never rewritten as a whole while the run trains.

On a disk new records are appended to `metrics.jsonl`. S3 objects can't be appended to: there new records are in parts
`metrics/<number>.jsonl` until the end of an attempt. A part's name is the index of its first record. Its records
replace the ones of the same indices in `metrics.jsonl`, and nothing follows the last part. So a merge whose parts are
not all deleted yet changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage, parse_json

# The metric that is the number of the step.
STEP = "step"
# Records per part. The last part is rewritten until it is full.
PART_RECORDS = 5000
DELETE_THREADS = 16

Record = dict[str, Any]


class Records(Protocol):
    """Growing list of a run's records."""

    def take(self, begin: Callable[[int], int]) -> tuple[int, list[Record]]:
        """Return the records that have changed since the last call, and the index of the first.

        Args:
            begin: Maps the index of the first changed record to the index of the first one to return.
        """
        ...

    def put_back(self, first: int) -> None:
        """Count the records from this index on as changed."""
        ...


class RecordFile:
    """Stores the records of one attempt.

    Args:
        storage: The run's folder.
    """

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        # On a disk: the number of records, and the byte offsets where the last one begins and ends.
        self._count = self._last = self._end = 0
        # In S3: the number of the last part.
        self._last_part = -1 if storage.is_local else max(_parts(storage), default=-1)

    def write(self, records: Records) -> None:
        """Store the new and changed records.

        Raises:
            OSError: They could not be stored; the next call tries again.
        """
        first, new = records.take(self._begin)
        if not new:
            return
        try:
            if self._storage.is_local:
                self._append(first, new)
            else:
                self._write_parts(first, new)
        except OSError:
            self._count = 0  # the file may be half written
            records.put_back(first)
            raise

    def _begin(self, changed: int) -> int:
        if not self._storage.is_local:
            return changed - changed % PART_RECORDS  # S3 takes whole objects
        # Only the last record of a file can be replaced in place.
        return changed if self._count and changed >= self._count - 1 else 0

    def _append(self, first: int, new: Sequence[Record]) -> None:
        lines = [_line(record).encode() for record in new]
        content = b"".join(lines)
        offset = 0
        if first > 0:
            offset = self._end if first == self._count else self._last
        if first == 0:
            self._storage.write(layout.METRICS, content)
        elif offset + len(content) < self._end:  # the last record became shorter
            before = self._storage.read(layout.METRICS)[:offset]
            self._storage.write(layout.METRICS, before + content)
        else:
            with Path(self._storage.path(layout.METRICS)).open("r+b") as file:
                file.seek(offset)
                file.write(content)
        self._count = first + len(new)
        self._end = offset + len(content)
        self._last = self._end - len(lines[-1])

    def _write_parts(self, first: int, new: Sequence[Record]) -> None:
        """Write the parts from this number on, after deleting later ones, the last one first."""
        for number in range(self._last_part, first, -PART_RECORDS):
            self._storage.delete(_part(number))
            self._last_part = number - PART_RECORDS
        for begin in range(0, len(new), PART_RECORDS):
            self._last_part = first + begin  # before the write, which may succeed although its response is lost
            self._storage.write(_part(first + begin), "".join(map(_line, new[begin : begin + PART_RECORDS])))


def read_records(storage: RunStorage) -> list[Record]:
    """Read the records of a run's metrics, also while it trains; an empty list before the first.

    Raises:
        OSError: They can't be read.
        ValueError: A line is broken.
    """
    parts: dict[int, list[Record]] = {}
    while not storage.is_local:
        with suppress(FileNotFoundError):  # merged or rewritten since it was listed
            parts = {number: _read(storage, _part(number)) for number in _parts(storage)}
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
    """Merge the parts into `metrics.jsonl` and delete them; return the records.

    Raises:
        OSError: The storage failed; the remaining parts stay valid.
    """
    records = read_records(storage)
    parts = [] if storage.is_local else _parts(storage)
    if parts:
        storage.write_lines(layout.METRICS, records)
        # The last part goes last: readers drop the records behind the last part that is there.
        with ThreadPoolExecutor(DELETE_THREADS) as threads:
            list(threads.map(lambda number: storage.delete(_part(number)), parts[:-1]))
        storage.delete_folder(layout.METRICS_PARTS)
    return records


def _parts(storage: RunStorage) -> list[int]:
    """Return the numbers of the parts, in order."""
    names = storage.file_sizes(layout.METRICS_PARTS)
    return sorted(int(name.removesuffix(".jsonl")) for name in names if re.fullmatch(r"\d{9}\.jsonl", name))


def _part(number: int) -> str:
    return f"{layout.METRICS_PARTS}/{number:09d}.jsonl"


def _read(storage: RunStorage, name: str) -> list[Record]:
    """Read the records of a file, without a last line that is only partly written."""
    content = None
    while True:
        previous, content = content, storage.read(name)
        try:
            return [parse_json(line) for line in content.split(b"\n")[:-1]]
        except ValueError:  # on a disk, a line may have been replaced while it was read
            if content == previous:
                raise


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
