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
from ray_on_ecs.run.gitignore import Patterns, from_options
from ray_on_ecs.run.ignore_files import Rules
from ray_on_ecs.run.left_out import KEY, KINDS, LINK, LeftOut, count_bytes, describe, printable, size_text

# Neither uploaded nor kept: it belongs to this machine, or is made again.
NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
# What may hold a key of the user, in small letters: left out, and named, unless --include names it.
KEYS = (
    *(".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".password-store", ".pulumi", ".ray-on-ecs"),
    *(".huggingface",),
    *("**/.config/gcloud", "**/.config/gh", "**/.config/rclone", "**/.cargo/credentials*"),
    *("**/.cache/huggingface/token", "**/.cache/huggingface/stored_tokens"),
    *(".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass", ".my.cnf", ".boto", ".s3cfg"),
    *(".vault-token", ".databrickscfg", "credentials.json", "kaggle.json", "*.tfstate", "*.tfstate.backup"),
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".*_history", "!*.py", "!*.pub"),
)
# Of NEVER, entries that are named when they are left out: a script may miss them.
NAMED = (".venv", "venv", "node_modules")
MAX_BYTES = 2**30
SHOWN = 3


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
    _check_is_project(folder, top, is_given=bool(include) or os.path.lexists(os.path.join(top, ".git")))
    listing = _Listing(
        top,
        include=from_options(include, top, "--include"),
        keys_to_include=from_options(filter(_names_key, include), top, "--include"),
        paths_to_include=from_options(filter(_names_path, include), top, "--include"),
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


def _check_is_project(folder: Path, top: str, *, is_given: bool) -> None:
    """Raise UsageError for the home directory and the folders above it, unless the user means it; always for `/`."""
    home = os.path.realpath(os.path.expanduser("~"))
    if top == os.path.sep:
        raise UsageError(f"--working-dir: {folder} holds more than code; give the folder with the script")
    if os.path.commonpath([top, home]) == top and not is_given:
        raise UsageError(
            f"--working-dir: {folder} holds your home directory, and more than code; give the folder with the script, "
            "or, if it is the project, run `git init` in it, or name its files by --include"
        )


def _names_key(pattern: str) -> bool:
    """Return whether a pattern of --include has a name at its end: data/* does not bring back a key."""
    return _has_name(pattern.rstrip("/").rpartition("/")[2])


def _names_path(pattern: str) -> bool:
    """Return whether it also begins with a name, before a slash: cache/ brings back nothing from a folder of keys."""
    first, slash, _ = pattern.strip("/").partition("/")
    return bool(slash) and _has_name(first) and _names_key(pattern)


def _has_name(part: str) -> bool:
    return bool(part.strip("*?."))


@dataclass
class _Listing:
    top: str
    include: Patterns
    keys_to_include: Patterns
    paths_to_include: Patterns
    exclude: Patterns
    never: Patterns
    files: list[CodeFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.named = from_options(NAMED, self.top, "")
        self.keys = from_options(KEYS, "", KEY)

    def walk(
        self, folder: str, rules: Rules, ignored: str = "", is_included: bool = False, has_keys: bool = False
    ) -> None:
        """List a folder; of one that is ignored, only files that are tracked or included.

        Args:
            folder: Its path.
            rules: The rules for the folder itself.
            ignored: The kind of ignore file that leaves it out, KEY if it may hold keys, or nothing.
            is_included: --include names it, or a folder above it.
            has_keys: --include names it, or a folder above it, as one that may hold keys.
        """
        try:
            with os.scandir(folder) as listing:
                entries = list(listing)
            os.lstat(os.path.join(folder, "."))  # a folder that is readable but not executable only has names
        except FileNotFoundError:  # deleted since its parent was read
            return
        except PermissionError:
            if not ignored:
                self.unreadable.append(self._name(folder))
            return
        rules = rules.enter(folder, is_nested=folder != self.top)
        for entry in entries:
            with suppress(FileNotFoundError):
                self._take(entry, rules, ignored, is_included, has_keys)

    def _take(self, entry: os.DirEntry[str], rules: Rules, above: str, is_included: bool, has_keys: bool) -> None:
        path, is_folder = entry.path, entry.is_dir(follow_symlinks=False)
        is_included = is_included or bool(self.include.decide(path, is_folder))
        # Compared without case, as some disks do.
        may_hold_key = above == KEY or bool(self.keys.decide("/" + self._name(path).lower(), is_folder))
        to_include = self.paths_to_include if above == KEY else self.keys_to_include
        has_keys = has_keys or (may_hold_key and bool(to_include.decide(path, is_folder)))
        is_key = may_hold_key and not has_keys
        if self.never.decide(path, is_folder):
            if self.named.decide(path, is_folder) and not above:
                self._leave_out(path, "")
        elif self.exclude.decide(path, is_folder):
            if not above:
                self._leave_out(path, self.exclude.source)
        else:
            ignored = "" if is_included else rules.ignored_by(path, is_folder, above)
            why = ignored or (KEY if is_key else "")
            before = len(self.files)
            has_more = self.paths_to_include if is_key else self.include or rules.tracks_below(path)
            if is_folder and (not why or has_more):
                self.walk(path, rules, KEY if is_key else ignored, is_included, has_keys)
            elif not is_folder and not why:
                self._take_file(path)
            if why and (not above or why == KEY != above):
                self._leave_out(path, why, is_ignored=why != KEY, taken=self.files[before:])

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
