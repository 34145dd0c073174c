"""Names of files and targets of links that others have chosen: they must stay in the folder that receives them."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

# Linux's limit for a file name, in bytes; a key in S3 may have 1,024.
LONGEST_NAME = 255
# Characters that macOS ignores in a name.
IGNORED = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def fault_of(name: str) -> str | None:
    """Return why a disk can't have a file of this path in a folder, or None if it can."""
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
        return "has an empty part, '.' or '..'"
    try:
        longest = max(len(part.encode("utf-8", "surrogateescape")) for part in parts)
    except UnicodeEncodeError:  # half of a UTF-16 character
        return "is not text"
    return f"has a part of more than {LONGEST_NAME} bytes" if longest > LONGEST_NAME else None


def is_of_git(name: str) -> bool:
    """Return whether a path lies in a folder that git takes for a repository, whose configuration names programs."""
    plain = (IGNORED.sub("", part).rstrip(" .").lower() for part in name.split("/"))
    return any(part in (".git", "git~1") for part in plain)


def leads_out(name: str, target: str) -> bool:
    """Return whether a link leads out of the folder in which it has this path, by its text."""
    place = posixpath.join(posixpath.dirname(name), target)
    return posixpath.isabs(target) or "\0" in target or posixpath.normpath(place).split("/")[0] == ".."


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a place in a folder, through all links on the way."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle lead nowhere; from Python 3.13 on they are no error
        return True


def make_way(folder: Path, path: Path) -> None:
    """Make the parent folders of a path in a folder; links and files that are in their place are deleted."""
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        ancestor = folder / parent
        if ancestor.is_symlink() or os.path.isfile(ancestor):
            ancestor.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
