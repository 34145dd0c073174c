"""Ignore files, and patterns in their syntax: git decides in a repository, and pathspec where git does not answer."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.code import git

GITIGNORE, RAYIGNORE, OF_USER = ".gitignore", ".rayignore", "core.excludesFile"
IGNORE_FILES = (GITIGNORE, RAYIGNORE, OF_USER)
TAKEN = "taken"  # the decision about a path that no ignore file leaves out
LONGEST = 4096  # characters of a pattern, as of a path on Linux
# Changes of pathspec's expressions. Of an asterisk that another one of the same name follows, and of two asterisks that
# others follow, at the start and later, each takes the first match of what is between them, and never another one: the
# result is the same, and a hostile pattern is not tried in all combinations. And [!a] is never a slash.
CHANGES = (
    (re.compile(r"\[\^/\]\*((?:\[\^/\]|[^/])*?)(?=\[\^/\]\*)"), r"(?>[^/]*?\1)"),
    (re.compile(r"^\^\(\?:\.\+/\)\?(.*?)(?=\(\?:/\.\+\)\?)"), r"^(?>(?:[^/]+/)*?\1(?=/))"),
    (re.compile(r"\(\?:/\.\+\)\?(.*?)(?=\(\?:/\.\+\)\?)"), r"(?>(?:/[^/]+)*?\1(?=/))"),
    (re.compile(r"(?<!\\)\[\^(?!/)"), r"(?!/)[^"),
)


class Patterns:
    """Patterns of an ignore file or an option, for paths below a folder or relative ones; the last match decides."""

    def __init__(self, lines: Iterable[str], folder: str = "", source: str = "") -> None:
        self._patterns = [pattern for line in lines if (pattern := _pattern(line))][::-1]
        self._start = len(folder.rstrip("/")) + 1 if folder else 0
        self.source = source

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def decide(self, path: str, is_folder: bool) -> bool | None:
        """Return whether a path is ignored, or None if no pattern matches.

        A folder's content shares its fate; the caller, who walks from the top, does not ask about it.
        """
        name = path[self._start :]
        for pattern, is_ignored, only_folders in self._patterns:
            if is_folder or not only_folders:
                found = pattern.search(name)
                if found and found.lastgroup is None:  # the group is a folder above
                    return is_ignored
        return None


def _pattern(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """Return the expression of a line, whether it ignores, and whether only folders; None if it matches nothing."""
    text = line if line.endswith("\\ ") else line.rstrip(" ")
    try:
        expression, is_ignored = GitIgnoreSpecPattern.pattern_to_regex(text.removesuffix("/")[: LONGEST + 1])
        if expression is None or len(text) > LONGEST:
            return None
        for part, change in CHANGES:
            expression = part.sub(change, expression)
        with warnings.catch_warnings(action="ignore"):
            return re.compile(expression, re.DOTALL), bool(is_ignored), text.endswith("/")
    except (ValueError, re.error):  # such as [c-a], or a backslash at the end
        return None


@dataclass(frozen=True)
class Rules:
    """Ignore files that count for the entries of one folder.

    Attributes:
        git: Those of git, the one with the last word at the end, where git itself does not answer.
        ray: The .rayignore files, which count besides: tracked files, too.
        ignored: The answer of git itself: see `git.ignored`.
        tracked: Paths that git tracks although it ignores them.
        fault: Why git does not answer, or nothing.
    """

    git: tuple[Patterns, ...] = ()
    ray: tuple[Patterns, ...] = ()
    ignored: frozenset[str] | None = None
    tracked: frozenset[str] = frozenset()
    fault: str = ""

    @classmethod
    def of(cls, folder: str) -> Rules:
        """Return the rules for a user's folder."""
        tracked, fault = git.tracked(folder)
        return cls(_of_user(folder), ignored=git.ignored(folder), tracked=tracked, fault=fault)

    def enter(self, folder: str, *, is_nested: bool = False) -> Rules:
        """Return the rules for the entries of a folder; git is not asked about a repository inside the user's."""
        rules = self
        if is_nested and os.path.lexists(os.path.join(folder, ".git")):  # a submodule or a clone: other rules
            rules = Rules(_of_user(folder), self.ray)
        of_git = rules.git
        if rules.ignored is None:
            of_git += _read(os.path.join(folder, GITIGNORE), folder, GITIGNORE)
        of_ray = rules.ray + _read(os.path.join(folder, RAYIGNORE), folder, RAYIGNORE)
        return replace(rules, git=of_git, ray=of_ray)

    def ignored_by(self, path: str, is_folder: bool, above: str = TAKEN) -> str:
        """Return the kind of ignore file that leaves a path out, or TAKEN; `above` is the decision about its folder."""
        if above == RAYIGNORE or _decide(self.ray, path, is_folder) == RAYIGNORE:
            return RAYIGNORE
        if above != TAKEN or path in self.tracked:
            return TAKEN if path in self.tracked else above
        if self.ignored is None:
            return _decide(self.git, path, is_folder)
        return GITIGNORE if path + "/" * is_folder in self.ignored else TAKEN

    def tracks_below(self, folder: str) -> bool:
        """Return whether an ignored folder holds files that are tracked."""
        return any(path.startswith(f"{folder}/") for path in self.tracked)


def _of_user(folder: str) -> tuple[Patterns, ...]:
    """Return the patterns of the user's configuration of git, for a repository in this folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    named = git.ask(os.sep, "config", "--path", "--null", "--get", "core.excludesFile")
    users = f"{home}/git/ignore" if named is None else named.removesuffix("\0")
    return _read(users, folder, OF_USER)


def _read(path: str, folder: str, source: str) -> tuple[Patterns, ...]:
    """Return the patterns of a file, if it is there; UsageError if it can't be read."""
    # git follows a link to the user's file, and none among the files of the repository.
    if not os.path.isfile(path) or (source in (GITIGNORE, RAYIGNORE) and os.path.islink(path)):
        return ()
    try:
        with open(path, "rb") as file:
            lines = os.fsdecode(file.read().removeprefix(b"\xef\xbb\xbf")).split("\n")
    except PermissionError as cause:
        raise UsageError(
            f"{path} can't be read: it names what must not be uploaded; make it readable, or delete it"
        ) from cause
    return (Patterns([line.removesuffix("\r") for line in lines], folder, source),)


def _decide(rules: tuple[Patterns, ...], path: str, is_folder: bool) -> str:
    for patterns in reversed(rules):
        decision = patterns.decide(path, is_folder)
        if decision is not None:
            return patterns.source if decision else TAKEN
    return TAKEN
