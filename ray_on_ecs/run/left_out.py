"""Entries of a user's folder that are not uploaded: their sizes, and the lines that name them."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

# The sizes are for the eye, and a data set of millions of files must not delay the start.
MAX_COUNTED = 100_000
SHOWN, SHOWN_KEYS = 3, 10
KINDS = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
LINK = "a link out of the folder"
KEY = "may hold a key"


@dataclass(frozen=True, order=True)
class LeftOut:
    """A file that is not uploaded, or a folder, of which all but a few files are not.

    Attributes:
        name: Path in the working directory, with "/" at the end for a folder, unless the name is itself the reason.
        size: In bytes, without the few.
        why: The kind of ignore file, or a word; empty if the name is the reason.
        is_ignored: An ignore file is the reason.
        is_minimum: True if there were too many files to count.
    """

    name: str
    size: int
    why: str
    is_ignored: bool = False
    is_minimum: bool = False

    def __str__(self) -> str:
        size = "more than " * self.is_minimum + size_text(self.size)
        return f"{printable(self.name)} ({', '.join(filter(None, (size, self.why)))})"


def describe(left_out: Sequence[LeftOut]) -> list[str]:
    """Return lines for the terminal: the largest of what is left out, what can't be uploaded at all, and keys."""
    impossible = {LINK, *KINDS.values()}
    ignored_entries = [entry for entry in left_out if entry.why not in (*impossible, KEY)]
    impossible_entries = [entry for entry in left_out if entry.why in impossible]
    lines = []
    for entries in (ignored_entries, impossible_entries):
        if entries:
            largest = [str(entry) for entry in sorted(entries, key=lambda entry: -entry.size)]
            lines.append(f"left out: {_first(largest, SHOWN)}")
    keys = [printable(entry.name) for entry in left_out if entry.why == KEY]
    if keys:
        lines.append(f"left out, as it may hold a key: {_first(keys, SHOWN_KEYS)}; --include PATH uploads one")
    return lines


def _first(texts: Sequence[str], number: int) -> str:
    more = f" and {len(texts) - number:,} more" if len(texts) > number else ""
    return ", ".join(texts[:number]) + more


def count_bytes(path: str) -> tuple[int, bool]:
    """Return the bytes of a file or of all files of a folder, and whether the count stopped early."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size, False
    size, number, folders = 0, 0, [path]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                number += 1
                if number > MAX_COUNTED:
                    return size, True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
    return size, False


def size_text(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}" if size < 10 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return "1 byte" if size == 1 else f"{size} bytes"


def printable(name: str) -> str:
    """Return a name as it can stand on one line of a terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()
