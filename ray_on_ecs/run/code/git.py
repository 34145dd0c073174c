"""Questions to git about a folder that may be a stranger's: no program that its repository names ever runs."""

from __future__ import annotations

import os
import subprocess
import tempfile

GIT_SECONDS = 20  # a repository on a slow network disk should not stop a run
# Set in a git hook, they would lead git to another repository.
MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
# Neither the repository's monitor and hooks run, nor the programs that fetch what a partial clone lacks.
HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
OFFLINE = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def ask(folder: str | os.PathLike[str], *arguments: str, **variables: str) -> str | None:
    """Return the output of git for a folder, or None without git, without a repository, or after a time limit.

    The command must not read contents of files: a repository may name filters for them, which are programs.
    """
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING} | OFFLINE | variables
    command = ["git", *HARMLESS, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS
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
    """Return the git commit of a folder as an environment variable; nothing if git does not answer with one."""
    commit = ask(folder, "rev-parse", "--verify", "HEAD")
    return {} if commit is None else {"GIT_COMMIT": commit.strip()}
