"""Files of the working directory to upload: the files that git would list, without what only this machine needs."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import key_files
from ray_on_ecs.run.gitignore import Patterns, from_options
from ray_on_ecs.run.ignore_files import Rules
from ray_on_ecs.run.left_out import KEY, KINDS, LINK, LeftOut, count_bytes, describe, printable, size_text

# Neither uploaded nor kept: it belongs to this machine, or is made again.
NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
# Of NEVER, entries that are named when they are left out: a script may miss them.
NAMED = (".venv", "venv", "node_modules")
MAX_BYTES = 2**30
SHOWN = 3
# An entry that --include names, or a folder above it, for which ignore files don't count; and one that may hold a key.
INCLUDED, INCLUDED_KEY = "--include", "--include of a key"


@dataclass(frozen=True, order=True)
class CodeFile:
    """A file or a symbolic link.

    Attributes:
        name: Its path in the folder, with "/", and surrogate escapes for bytes that are not UTF-8.
        size: In bytes.
        link: The target of a link.
    """

    name: str
    size: int
    link: str | None = None


@dataclass(frozen=True)
class CodeFiles:
    """The files of a folder that are uploaded, and what is not, both by name."""

    folder: Path
    files: tuple[CodeFile, ...]
    left_out: tuple[LeftOut, ...]

    def describe_left_out(self) -> list[str]:
        """Return lines for the terminal: the largest of what is left out, and what can't be uploaded at all."""
        return describe(self.left_out)


def list_code(
    folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = (), never: Sequence[str] = ()
) -> CodeFiles:
    """List the files of a folder that are uploaded.

    Args:
        folder: A user's folder, in a git repository or not.
        include: Patterns, as in .gitignore, that bring back what the ignore files leave out.
        exclude: Patterns that leave out more; they win.
        never: Patterns of what is left out without a word.

    Raises:
        UsageError: Something can't be read.
    """
    top = os.path.realpath(folder)
    check_is_project(folder)
    listing = _Listing(
        top,
        include=from_options(include, top, "--include"),
        named=frozenset(pattern.strip("/") for pattern in include),
        exclude=from_options(exclude, top, "--exclude"),
        never=from_options((*NEVER, *never), top, ""),
    )
    listing.walk(top, Rules.above(top))
    if listing.unreadable:
        # If it were left out, the script would miss it, after the nodes have started.
        names = ", ".join(printable(name) for name in sorted(listing.unreadable)[:SHOWN])
        entries = "1 entry" if len(listing.unreadable) == 1 else f"{len(listing.unreadable):,} entries"
        raise UsageError(
            f"--working-dir: {folder} has {entries} that you may not read, such as {names}; "
            "all code is uploaded: make them readable, or leave them out by --exclude or .gitignore"
        )
    files = sorted(listing.files)
    return CodeFiles(Path(top), tuple(files), tuple(sorted(listing.left_out)))


def check_is_project(folder: Path) -> None:
    """Raise UsageError for `/`, and for the home directory and the folders above it, unless it has a `.git`."""
    top = os.path.realpath(folder)
    home = os.path.realpath(os.path.expanduser("~"))
    if top == os.path.sep:
        raise UsageError(f"--working-dir: {folder} holds more than code; give the folder with the script")
    if os.path.commonpath([top, home]) == top and not os.path.lexists(os.path.join(top, ".git")):
        raise UsageError(
            f"--working-dir: {folder} holds your home directory, and more than code; give the folder with the script, "
            "or, if it is the project, run `git init` in it"
        )


@dataclass
class _Listing:
    top: str
    include: Patterns
    named: frozenset[str]  # the same, as paths: a pattern such as data/* does not bring back a key
    exclude: Patterns
    never: Patterns
    files: list[CodeFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worth_naming = from_options(NAMED, self.top, "")

    def walk(self, folder: str, rules: Rules, above: str = "") -> None:
        """List a folder; of one that is left out, only files that are tracked or included.

        Args:
            folder: Its path.
            rules: The rules for the folder itself.
            above: How it counts: see `_decide`.
        """
        try:
            with os.scandir(folder) as listing:
                entries = list(listing)
            os.lstat(os.path.join(folder, "."))  # a folder that is readable but not executable only has names
        except FileNotFoundError:  # deleted since its parent was read
            return
        except PermissionError:
            if not _is_left_out(above):
                self.unreadable.append(self._name(folder))
            return
        rules = rules.enter(folder, is_nested=folder != self.top)
        for entry in entries:
            with suppress(FileNotFoundError):
                self._take(entry, rules, above)

    def _take(self, entry: os.DirEntry[str], rules: Rules, above: str) -> None:
        path, is_folder = entry.path, entry.is_dir(follow_symlinks=False)
        if self.never.decide(path, is_folder):
            if self.worth_naming.decide(path, is_folder) and not _is_left_out(above):
                self._leave_out(path, "")
        elif self.exclude.decide(path, is_folder):
            if not _is_left_out(above):
                self._leave_out(path, self.exclude.source)
        else:
            why = self._decide(path, is_folder, rules, above)
            before = len(self.files)
            if is_folder and (not _is_left_out(why) or self._has_more(path, rules, why)):
                self.walk(path, rules, why)
            elif not is_folder and not _is_left_out(why):
                self._take_file(path)
            if _is_left_out(why) and (not _is_left_out(above) or why == KEY != above):
                self._leave_out(path, why, is_ignored=why != KEY, taken=self.files[before:])

    def _decide(self, path: str, is_folder: bool, rules: Rules, above: str) -> str:
        """Return why an entry is left out (KEY or the kind of ignore file), INCLUDED, INCLUDED_KEY, or nothing."""
        if above == INCLUDED_KEY:
            return above
        if above == KEY or key_files.may_hold_key(path, self._name(path), is_folder):
            return INCLUDED_KEY if self._name(path) in self.named else KEY
        if above == INCLUDED or self.include.decide(path, is_folder):
            return INCLUDED
        return rules.ignored_by(path, is_folder, above)

    def _has_more(self, path: str, rules: Rules, why: str) -> bool:
        """Return whether a folder that is left out may have files that are not."""
        if why == KEY:
            return any(name.startswith(f"{self._name(path)}/") for name in self.named)
        return bool(self.include) or rules.tracks_below(path)

    def _take_file(self, path: str) -> None:
        status, name = os.lstat(path), self._name(path)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            if self._leads_out(path, target):
                self._leave_out(path, LINK)
            else:
                self.files.append(CodeFile(name, 0, target))
        elif not stat.S_ISREG(status.st_mode):
            self._leave_out(path, KINDS.get(stat.S_IFMT(status.st_mode), "a device"))
        elif not os.access(path, os.R_OK):
            self.unreadable.append(name)
        else:
            self.files.append(CodeFile(name, status.st_size))

    def _leads_out(self, path: str, target: str) -> bool:
        """Return whether a link leads out of the folder, by its text or by other links that it passes."""
        if os.path.isabs(target):
            return True
        joined = os.path.join(os.path.dirname(path), target)
        targets = {os.path.normpath(joined), os.path.realpath(joined)}
        return any(os.path.commonpath([self.top, resolved]) != self.top for resolved in targets)

    def _leave_out(self, path: str, why: str, is_ignored: bool = False, taken: Sequence[CodeFile] = ()) -> None:
        size, is_minimum = count_bytes(path)
        size -= sum(file.size for file in taken)
        if size > 0 or not taken:
            name = self._name(path) + "/" * (bool(why) and os.path.isdir(path) and not os.path.islink(path))
            self.left_out.append(LeftOut(name, max(size, 0), why, is_ignored, is_minimum))

    def _name(self, path: str) -> str:
        return path[len(self.top.rstrip("/")) + 1 :] or "."


def _is_left_out(why: str) -> bool:
    return why not in ("", INCLUDED, INCLUDED_KEY)


def check_size(folder: Path, files: Sequence[CodeFile]) -> None:
    """Raise UsageError if files are too many bytes to be code."""
    size = sum(file.size for file in files)
    if size <= MAX_BYTES:
        return
    sizes: Counter[str] = Counter()
    for file in files:
        top, slash, _ = file.name.partition("/")
        sizes[top + slash] += file.size
    largest = ", ".join(f"{printable(name)} ({size_text(bytes_)})" for name, bytes_ in sizes.most_common(SHOWN))
    raise UsageError(
        f"--working-dir: {folder} has {size_text(size)}, and code is at most {size_text(MAX_BYTES)}; the largest are "
        f"{largest}: leave out what is not code by --exclude or .gitignore, and give data as --input"
    )
