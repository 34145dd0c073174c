"""The ignore files of a folder and of those above it, in git's order, and the files that git tracks nevertheless."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.gitignore import Patterns, from_content

GITIGNORE, RAYIGNORE = ".gitignore", ".rayignore"
# A repository on a slow network disk should not stop a run.
GIT_SECONDS = 20
# Set in a git hook, they would lead git to another repository.
MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
# A repository names programs that git runs, and it may be a stranger's: neither its monitor and hooks run, nor the
# programs that fetch what a partial clone lacks.
HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
# Keys that can name a filter, also in a line of a value: git-lfs, which many users have installed as a filter, reads
# the keys below `lfs.`, and splits the output of `git config --list` into lines. Not counted are the keys that git-lfs
# writes into each clone. From a `.lfsconfig` it takes only addresses and patterns.
NAMES_FILTER = re.compile(
    r"^(?:filter\.|lfs\.(?!repositoryformatversion$|[^=\n]*\.(?:access|locksverify)$))", re.MULTILINE | re.IGNORECASE
)
OFFLINE = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True)
class Rules:
    """Ignore files that count for the entries of one folder.

    Attributes:
        git: Those of git, the one with the last word at the end.
        ray: The .rayignore files, which count besides: tracked files, too.
        tracked: Paths that git tracks although it ignores them.
    """

    git: tuple[Patterns, ...] = ()
    ray: tuple[Patterns, ...] = ()
    tracked: frozenset[str] = frozenset()

    @classmethod
    def above(cls, folder: str) -> Rules:
        """Return the rules of the folders above this one, from the root of its repository on."""
        parents = [folder]
        while not os.path.lexists(os.path.join(parents[-1], ".git")):
            if parents[-1] == os.path.dirname(parents[-1]):
                return cls()
            parents.append(os.path.dirname(parents[-1]))
        rules = cls()
        for parent, child in zip(parents[:0:-1], parents[-2::-1], strict=True):
            rules = rules.enter(parent)
            if rules.ignored_by(child, is_folder=True):
                return cls()  # the user names the folder, so ignore files above it do not apply
        return rules

    def enter(self, folder: str, *, is_nested: bool = False) -> Rules:
        """Return the rules for the entries of a folder; git is not asked about a repository inside the user's."""
        rules = self
        if os.path.lexists(os.path.join(folder, ".git")):  # a submodule or a nested clone starts with new rules
            tracked = frozenset[str]() if is_nested else _tracked(folder)
            rules = Rules(_of_repository(folder, is_nested), self.ray, tracked)
        git = _read(os.path.join(folder, GITIGNORE), folder, GITIGNORE)
        ray = _read(os.path.join(folder, RAYIGNORE), folder, RAYIGNORE)
        return Rules(rules.git + git, rules.ray + ray, rules.tracked)

    def ignored_by(self, path: str, is_folder: bool, above: str = "") -> str:
        """Return the kind of ignore file that leaves a path out, or nothing; `above` has left out its folder."""
        if above == RAYIGNORE or _decide(self.ray, path, is_folder):
            return RAYIGNORE
        return "" if path in self.tracked else above or _decide(self.git, path, is_folder)

    def tracks_below(self, folder: str) -> bool:
        """Return whether an ignored folder holds files that are tracked."""
        return any(path.startswith(f"{folder}/") for path in self.tracked)


def ask_git(folder: str | os.PathLike[str], *arguments: str, timeout: float = GIT_SECONDS) -> str | None:
    """Return the output of git for a folder, or None without git, without a repository, or after a timeout.

    No program of the repository runs, unless the command filters contents (see `has_filters`).
    """
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING} | OFFLINE
    # Else `git status` would write to the repository.
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", *HARMLESS, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def has_filters(folder: str | os.PathLike[str]) -> bool:
    """Return whether a repository itself may name programs that filter contents; also if git does not say it.

    Those of the user's own configuration don't count. A git before 2.26 can't tell them apart.
    """
    listed = ask_git(folder, "config", "--show-scope", "--null", "--list")
    if listed is None:
        return True
    scopes, entries = listed.split("\0")[:-1:2], listed.split("\0")[1::2]
    named = {scope for scope, entry in zip(scopes, entries, strict=True) if NAMES_FILTER.search(entry)}
    return not named <= {"system", "global", "command"}


def _of_repository(folder: str, is_nested: bool) -> tuple[Patterns, ...]:
    """Return the patterns for a whole repository: https://git-scm.com/docs/gitignore#_description.

    For one inside the user's, git is asked about the user's configuration, and not in the repository.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    users = ask_git(os.sep if is_nested else folder, "config", "--path", "--null", "--get", "core.excludesFile")
    own = None if is_nested else ask_git(folder, "rev-parse", "--git-path", "info/exclude")
    users_path = f"{home}/git/ignore" if users is None else users.removesuffix("\0")
    own_path = ".git/info/exclude" if own is None else own.removesuffix("\n")
    return (
        *_read(os.path.join(folder, users_path), folder, "core.excludesFile"),
        *_read(os.path.join(folder, own_path), folder, ".git/info/exclude"),
    )


def _tracked(folder: str) -> frozenset[str]:
    names = ask_git(folder, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard") or ""
    return frozenset(os.path.join(folder, name) for name in names.split("\0") if name)


def _read(path: str, folder: str, source: str) -> tuple[Patterns, ...]:
    """Return the patterns of a file, if it is there.

    Raises:
        UsageError: It can't be read.
    """
    # git follows a link to the user's file, and none among the files of the repository.
    is_link = source in (GITIGNORE, RAYIGNORE) and os.path.islink(path)
    if is_link or not os.path.isfile(path):
        return ()
    try:
        with open(path, "rb") as file:
            return (from_content(file.read(), folder, source),)
    except PermissionError as cause:
        raise UsageError(
            f"{path} can't be read: it names what must not be uploaded; make it readable, or delete it"
        ) from cause


def _decide(rules: tuple[Patterns, ...], path: str, is_folder: bool) -> str:
    for patterns in reversed(rules):
        decision = patterns.decide(path, is_folder)
        if decision is not None:
            return patterns.source if decision else ""
    return ""
