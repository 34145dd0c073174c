"""Names of files and targets of links that others have chosen: they must stay in the folder that receives them."""

from __future__ import annotations

import errno
import os
import posixpath
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

# Limits for a file name (macOS counts characters, Linux bytes) and for a path; a key in S3 may have 1,024 bytes.
LONGEST_NAME, LONGEST_PATH = 255, 4096
# Characters that macOS ignores in a name.
IGNORED = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")

# Files of a repository that git needs to take a folder for one, and to read its configuration.
BARE = ("HEAD", "config", "commondir")


def fault_of(name: str) -> str | None:
    """Return why a disk can't have a file of this path in a folder, or None if it can."""
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
        return "has an empty part, '.' or '..'"
    try:
        longest, length = max(map(_length, parts)), _length(name)
    except UnicodeEncodeError:  # half of a UTF-16 character, or on macOS a byte that is not UTF-8
        return "is not text"
    unit = "characters" if sys.platform == "darwin" else "bytes"
    if longest > LONGEST_NAME:
        return f"has a part of more than {LONGEST_NAME} {unit}"
    return f"has {length:,} {unit}, and a path at most {LONGEST_PATH:,}" if length > LONGEST_PATH else None


def _length(name: str) -> int:
    is_macos = sys.platform == "darwin"
    return len(name.encode("utf-16-le")) // 2 if is_macos else len(name.encode(errors="surrogateescape"))


def is_of_git(name: str) -> bool:
    """Return whether a path is what git takes for a repository, whose configuration names programs, or lies in one."""
    return any(part in (".git", "git~1") for part in _plain(name).split("/"))


def _plain(name: str) -> str:
    """Return a path as disks that ignore case and some characters compare it."""
    return "/".join(IGNORED.sub("", part).rstrip(" .").lower() for part in name.split("/"))


def of_bare_repositories(names: Iterable[str], folder: Path) -> set[str]:
    """Return the paths that would make folders repositories without `.git`, with each other or with files of a folder.

    git takes a folder for one by its HEAD, and reads its configuration from there or from where `commondir` leads.
    """
    plain = _plain if ignores_case(folder) else str
    found: dict[str, dict[str, str]] = {}
    for name in names:
        above, _, last = plain(name).rpartition("/")
        if last in map(plain, BARE):
            found.setdefault(above, {})[name] = last
    bare: set[str] = set()
    for above, own in found.items():
        there = {plain(mark) for mark in BARE if os.path.lexists(folder / above / mark)}.union(own.values())
        if plain("HEAD") in there and len(there) > 1:
            bare |= own.keys()
    return bare


def is_refused(name: str) -> bool:
    """Return whether a file of this path is not written for a run: a disk can't have it, or git would read it."""
    return fault_of(name) is not None or is_of_git(name)


def folders_of(name: str) -> set[str]:
    """Return the folders in which a path lies."""
    return {name[:index] for index, letter in enumerate(name) if letter == "/"}


def conflicts(names: Iterable[str], folder: Path) -> list[str]:
    """Return the names that a folder can't have beside the others: one is a folder of another, or a second file."""
    names = list(names)
    folded = {name: name for name in names}
    if ignores_case(folder):
        folded = {name: unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold()) for name in names}
    folders = {above for name in folded.values() for above in folders_of(name)}
    taken: set[str] = set()
    found = []
    for name in names:
        if folded[name] in folders or folded[name] in taken:
            found.append(name)
        taken.add(folded[name])
    return found


def ignores_case(folder: Path) -> bool:
    """Return whether a folder's disk takes names that differ only in case for one, as that of macOS does."""
    for path in (folder.absolute(), *folder.absolute().parents):
        other = path.with_name(path.name.swapcase()) if path.name else path
        if other != path and path.exists():
            return other.exists() and other.samefile(path)
    return False


def leads_out(name: str, target: str) -> bool:
    """Return whether a link leads out of the folder in which it has this path, by its text."""
    place = posixpath.join(posixpath.dirname(name), target)
    return posixpath.isabs(target) or "\0" in target or posixpath.normpath(place).split("/")[0] == ".."


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a place in a folder, through all links on the way."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links leads nowhere, and Python 3.13 does not raise for it
        return True


def make_way(folder: Path, path: Path, *, over_files: bool = False) -> None:
    """Make the parent folders of a path in a folder; links in their place are deleted, and files with `over_files`."""
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        ancestor = folder / parent
        if ancestor.is_symlink() or (over_files and ancestor.is_file()):
            ancestor.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)


def make_link(path: Path, target: str) -> bool:
    """Make a symbolic link; return False if this disk can't have it: links, their length and letters have limits."""
    try:
        path.symlink_to(target)
    except OSError as cause:
        if cause.errno in (errno.EPERM, errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG):
            return False
        raise
    return True
