"""Questions to git about a folder that may be a stranger's: no program that its repository names ever runs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

# A repository on a slow network disk should not stop a run, and the commit is worth a shorter wait.
GIT_SECONDS, REVISION_SECONDS = 20, 10
# Set in a git hook, they would lead git to another repository.
MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
# Neither the repository's monitor and hooks run, nor the programs that fetch what a partial clone lacks.
HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
# Without the last one, `git status` would write to the repository.
OFFLINE = {
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
# Keys that can name a filter, also in a line of a value: git-lfs, which many users have installed as a filter, reads
# the keys below `lfs.`, and splits the output of `git config --list` into lines. Not counted are the keys that git-lfs
# writes into each clone. From a `.lfsconfig` it takes only addresses and patterns.
NAMES_FILTER = re.compile(
    r"^(?:filter\.|lfs\.(?!repositoryformatversion$|[^=\n]*\.(?:access|locksverify)$))", re.MULTILINE | re.IGNORECASE
)


def ask(folder: str | os.PathLike[str], *arguments: str, seconds: float = GIT_SECONDS, **variables: str) -> str | None:
    """Return the output of git for a folder, or None without git, without a repository, or after a time limit.

    No program of the repository runs, unless the command filters contents (see `has_filters`).
    """
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING} | OFFLINE | variables
    command = ["git", *HARMLESS, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def tracked(folder: str) -> frozenset[str]:
    """Return the paths of the files below a folder that git tracks although it ignores them."""
    return _paths(folder, ask(folder, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"))


def ignored(folder: str) -> frozenset[str] | None:
    """Return the paths below a folder that ignore files of git name; a folder has "/" at its end, and stands for all.

    None if git does not answer, as in a folder that is itself ignored.
    """
    with tempfile.TemporaryDirectory() as empty:  # with an empty index, a folder with tracked files is ignored, too
        others = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
        listed = ask(folder, *others, GIT_INDEX_FILE=os.path.join(empty, "index"))
    return None if listed is None or listed.startswith("./\0") else _paths(folder, listed)


def _paths(folder: str, listed: str | None) -> frozenset[str]:
    return frozenset(os.path.join(folder, name) for name in (listed or "").split("\0") if name)


def revision(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return environment variables with the git commit of a folder and whether its files differ from it.

    The result is empty if git is missing or slow, or if there is not a commit. GIT_DIRTY is missing if git does not
    answer, or if the repository has filters: to compare the files would run them.
    """
    commit = ask(folder, "rev-parse", "--verify", "HEAD", seconds=REVISION_SECONDS)
    if commit is None:
        return {}
    variables = {"GIT_COMMIT": commit.strip()}
    if not has_filters(folder):
        status = ("status", "--porcelain", "--ignore-submodules=all", "--", ".")
        changes = ask(folder, *status, seconds=REVISION_SECONDS)
        if changes is not None:
            variables["GIT_DIRTY"] = "1" if changes else "0"
    return variables


def has_filters(folder: str | os.PathLike[str]) -> bool:
    """Return whether a repository itself may name programs that filter contents; also if git does not say it.

    Those of the user's own configuration don't count. A git before 2.26 can't tell them apart.
    """
    listed = ask(folder, "config", "--show-scope", "--null", "--list")
    if listed is None:
        return True
    scopes, entries = listed.split("\0")[:-1:2], listed.split("\0")[1::2]
    named = {scope for scope, entry in zip(scopes, entries, strict=True) if NAMES_FILTER.search(entry)}
    return not named <= {"system", "global", "command"}
