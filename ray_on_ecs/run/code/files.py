"""Files of the working directory to upload: those that git would list, without what only this machine needs and keys.

Each file or folder that is left out has a reason, for the user.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray_on_ecs.errors import UsageError, counted
from ray_on_ecs.names import is_inside, leads_out
from ray_on_ecs.run.code.ignore import IGNORE_FILES, TAKEN, Patterns, Rules
from ray_on_ecs.run.code.keys import may_hold_key

# Neither uploaded nor kept: it belongs to this machine, or is made again. A script may miss the NAMED ones.
NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
NAMED = (".venv", "venv", "node_modules")
MAX_BYTES = 2**30
MAX_LINKS = 1000  # more files are a data set
SHOWN, SHOWN_KEYS = 3, 10
# Reasons to leave an entry out, besides an ignore file: its name, silently or with a reason, and others.
UNNAMED, BY_NAME, EXCLUDED, KEY = "never", "", "--exclude", "may hold a key"
LINK, NO_FILE = "a link out of the folder", "not a file"
# Of what is uploaded: an entry that --include names, or a folder above it, for which ignore files don't count; and one
# that may hold a key.
INCLUDED, INCLUDED_KEY = "--include", "--include of a key"
UPLOADED = (TAKEN, INCLUDED, INCLUDED_KEY)


@dataclass(frozen=True, order=True)
class CodeFile:
    """A file, or a symbolic link with its target.

    The name is the path in the folder, with "/", and surrogate escapes for bytes that are not UTF-8.
    """

    name: str
    size: int
    link: str | None = None


@dataclass(frozen=True, order=True)
class LeftOut:
    """A file that is not uploaded, or a folder, of which all but a few files are not.

    Attributes:
        name: Path in the working directory, with "/" at the end for a folder, unless the name is the reason.
        why: The kind of ignore file, or a word; empty if the name is the reason.
    """

    name: str
    why: str

    def __str__(self) -> str:
        return printable(self.name) + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class CodeFiles:
    """The files of a folder that are uploaded, and what is not, both by name; and why git can't read its repository."""

    folder: Path
    files: tuple[CodeFile, ...]
    left_out: tuple[LeftOut, ...]
    git_fault: str = ""

    def describe_left_out(self) -> Iterator[str]:
        """Yield lines for the terminal: what is left out, folders first, what can't be uploaded at all, and keys."""
        impossible = [str(entry) for entry in self.left_out if entry.why in (LINK, NO_FILE)]
        others = [entry for entry in self.left_out if entry.why not in (LINK, NO_FILE, KEY)]
        others.sort(key=lambda entry: not entry.name.endswith("/"))
        for entries in (list(map(str, others)), impossible):
            if entries:
                yield f"left out: {_first(entries, SHOWN)}"
        if self.git_fault:
            what = "files that it tracks although .gitignore names them are not uploaded"
            yield f"git can't read the repository, so {what}: {self.git_fault}"
        keys = [printable(entry.name) for entry in self.left_out if entry.why == KEY]
        if keys:
            yield f"left out, as it may hold a key: {_first(keys, SHOWN_KEYS)}; --include PATH uploads one"


def list_code(
    folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = (), never: Sequence[str] = ()
) -> CodeFiles:
    """List the files of a folder that are uploaded; UsageError if one can't be read.

    Args:
        folder: A user's folder, in a git repository or not.
        include: Patterns, as in .gitignore, that bring back what the ignore files leave out.
        exclude: Patterns that leave out more; they win.
        never: Patterns of what is left out silently.
    """
    check_is_project(folder)
    top = os.path.realpath(folder)
    named = frozenset(pattern.strip("/") for pattern in include)
    listing = _Listing(top, Patterns(include), named, Patterns(exclude), Patterns((*NEVER, *never)))
    rules = Rules.of(top)
    listing.walk(top, rules)
    if listing.unreadable:
        # If it were left out, the script would miss it, after the nodes have started.
        names = ", ".join(printable(name) for name in sorted(listing.unreadable)[:SHOWN])
        entries = "1 entry" if len(listing.unreadable) == 1 else f"{len(listing.unreadable):,} entries"
        raise UsageError(
            f"--working-dir: {folder} has {entries} that you may not read, such as {names}; "
            "all code is uploaded: make them readable, or leave them out by --exclude or .gitignore"
        )
    return CodeFiles(Path(top), tuple(sorted(listing.files)), tuple(sorted(listing.left_out)), rules.fault)


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


def check_size(folder: Path, files: Sequence[CodeFile]) -> None:
    """Raise UsageError if files are too many bytes to be code."""
    size = sum(file.size for file in files)
    if size > MAX_BYTES:
        sizes: Counter[str] = Counter()
        for file in files:
            top, slash, _ = file.name.partition("/")
            sizes[top + slash] += file.size
        largest = ", ".join(f"{printable(name)} ({size_text(bytes_)})" for name, bytes_ in sizes.most_common(SHOWN))
        raise UsageError(
            f"--working-dir: {folder} has {size_text(size)}, and code is at most {size_text(MAX_BYTES)}; the largest "
            f"are {largest}: leave out what is not code by --exclude or .gitignore, and give data as --input"
        )


def beyond_limit(files: Sequence[CodeFile]) -> list[CodeFile]:
    """Return the largest files, without which the others are few enough bytes to be code; none if these are many."""
    size, beyond = sum(file.size for file in files), list[CodeFile]()
    for file in sorted(files, key=lambda file: file.size, reverse=True):
        if size <= MAX_BYTES:
            return beyond
        beyond.append(file)
        size -= file.size
        if len(beyond) > MAX_LINKS:
            break
    return []


def describe_linked(files: Sequence[CodeFile]) -> str:
    """Return a line for the terminal about files that the run has as links."""
    names = _first([f"{printable(file.name)} ({size_text(file.size)})" for file in files], SHOWN)
    if len(files) == 1:
        return f"{names} is linked, not copied: a script that writes it changes your file"
    return f"{names} are linked, not copied: a script that writes them changes your files"


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

    def walk(self, folder: str, rules: Rules, above: str = TAKEN) -> bool:
        """List a folder; of one that is left out, only files that are tracked or included.

        `above` is the decision about the folder, and `rules` are those by which it was made. Returns True if all
        entries are uploaded.
        """
        try:
            with os.scandir(folder) as listing:
                entries = list(listing)
            os.lstat(os.path.join(folder, "."))  # a folder that is readable but not executable only has names
        except FileNotFoundError:  # deleted since its parent was read
            return True
        except PermissionError:
            if above in UPLOADED:
                self.unreadable.append(os.path.relpath(folder, self.top))
            return False
        rules = rules.enter(folder, is_nested=folder != self.top)
        are_taken = True
        for entry in entries:
            with suppress(FileNotFoundError):
                are_taken &= self._take(entry.path, entry.is_dir(follow_symlinks=False), rules, above)
        return are_taken and bool(entries)

    def _take(self, path: str, is_folder: bool, rules: Rules, above: str) -> bool:
        name = path[len(self.top) + 1 :]
        why = self._decide(path, name, is_folder, rules, above)
        is_named = above in UPLOADED or why in UPLOADED or why == KEY != above
        is_taken = False
        if is_folder and (why in UPLOADED or self._has_more(path, name, rules, why)):
            is_taken = self.walk(path, rules, why)
        elif not is_folder and why in UPLOADED:
            why = self._take_file(path, name)
            is_taken = why in UPLOADED
        if why not in (*UPLOADED, UNNAMED) and is_named and not is_taken:
            self.left_out.append(LeftOut(f"{name}/" if is_folder and why != BY_NAME else name, why))
        return is_taken or why == UNNAMED

    def _decide(self, path: str, name: str, is_folder: bool, rules: Rules, above: str) -> str:
        """Return one of UPLOADED, or why an entry is left out: the kind of ignore file, or a word."""
        if self.never.decide(name, is_folder):
            return BY_NAME if os.path.basename(path) in NAMED else UNNAMED
        if self.exclude.decide(name, is_folder):
            return EXCLUDED
        if above == INCLUDED_KEY:
            return above
        if above == KEY or may_hold_key(path, name, is_folder):
            return INCLUDED_KEY if name in self.named else KEY
        if above == INCLUDED or self.include.decide(name, is_folder):
            return INCLUDED
        return rules.ignored_by(path, is_folder, above)

    def _has_more(self, path: str, name: str, rules: Rules, why: str) -> bool:
        """Return whether a folder that is left out may have files that are not."""
        if why == KEY:
            return any(named.startswith(f"{name}/") for named in self.named)
        return why in IGNORE_FILES and (bool(self.include) or rules.tracks_below(path))

    def _take_file(self, path: str, name: str) -> str:
        """Take a file or a link; return why it can't be uploaded, or TAKEN."""
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            target = _relative(path, os.readlink(path))
            if leads_out(name, target) or not is_inside(Path(path), Path(self.top)):
                return LINK
            self.files.append(CodeFile(name, 0, target))
        elif not stat.S_ISREG(status.st_mode):
            return NO_FILE
        elif os.access(path, os.R_OK):
            self.files.append(CodeFile(name, status.st_size))
        else:
            self.unreadable.append(name)
        return TAKEN


def _relative(link: str, target: str) -> str:
    """Return the target of a link from the link's folder, because the nodes have the code elsewhere."""
    if not os.path.isabs(target):
        return target
    folder, name = os.path.split(target.rstrip("/"))
    return os.path.relpath(os.path.join(os.path.realpath(folder), name), os.path.realpath(os.path.dirname(link)))


def size_text(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}" if size < 10 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return counted(size, "byte")


def printable(name: str) -> str:
    """Return a name as it can stand on one line of a terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _first(texts: Sequence[str], number: int) -> str:
    more = f" and {len(texts) - number:,} more" if len(texts) > number else ""
    return ", ".join(texts[:number]) + more
