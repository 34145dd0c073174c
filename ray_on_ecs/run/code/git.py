"""Questions to git about a folder that may be a stranger's: no program that its repository names ever runs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from ray_on_ecs.errors import one_line

GIT_SECONDS = 20  # a repository on a slow network disk should not stop a run
# Set in a git hook, they would lead git to another repository.
MISLEADING = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_SHALLOW_FILE"),
)
# Neither the repository's monitor and hooks run, nor the programs that fetch what a partial clone lacks.
HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
OFFLINE = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
TRACKED = ("ls-files", "-z", "--cached", "--ignored", "--exclude-standard")


def ask(folder: str | os.PathLike[str], *arguments: str, **variables: str) -> str | None:
    """Return the output of git for a folder, or None without git, without a repository, or after a time limit.

    The command must not read contents of files: a repository may name filters for them, which are programs.
    """
    try:
        done = _run(folder, *arguments, **variables)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def tracked(folder: str | os.PathLike[str]) -> tuple[frozenset[str], str]:
    """Return the paths of the files below a folder that git tracks although it ignores them.

    And why git does not answer for the folder's repository; empty if it does, and without a repository.
    """
    try:
        done = _run(folder, *TRACKED)
        if done.returncode == 0:
            return _paths(folder, os.fsdecode(done.stdout)), ""
        lines = [line.strip() for line in os.fsdecode(done.stderr).splitlines()]
        cures = [line for line in lines if line.startswith("git config")]  # of a repository of another user
        reason = next((line for line in lines if line.startswith("fatal: ")), lines[-1] if lines else "git failed")
        fault = "; ".join([one_line(reason.removeprefix("fatal: ")), *cures[:1]])
    except FileNotFoundError:
        fault = "git is not installed"
    except (OSError, subprocess.TimeoutExpired) as cause:
        fault = one_line(cause)
    folders = (folder, *Path(folder).absolute().parents)
    return frozenset(), fault if any(os.path.lexists(os.path.join(each, ".git")) for each in folders) else ""


def _run(folder: str | os.PathLike[str], *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING} | OFFLINE | variables
    command = ["git", *HARMLESS, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS
    )


def ignored(folder: str) -> frozenset[str] | None:
    """Return the paths below a folder that ignore files of git name; a folder has "/" at its end, and stands for all.

    None if git does not answer, as in a folder that is itself ignored.
    """
    with tempfile.TemporaryDirectory() as empty:  # with an empty index, a folder with tracked files is ignored, too
        others = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
        listed = ask(folder, *others, GIT_INDEX_FILE=os.path.join(empty, "index"))
    return None if listed is None or listed.startswith("./\0") else _paths(folder, listed)


def _paths(folder: str | os.PathLike[str], listed: str) -> frozenset[str]:
    return frozenset(os.path.join(folder, name) for name in listed.split("\0") if name)


def revision(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the git commit of a folder as an environment variable; nothing if git does not answer with one."""
    commit = ask(folder, "rev-parse", "--verify", "HEAD")
    return {} if commit is None else {"GIT_COMMIT": commit.strip()}


def version(folder: str | os.PathLike[str]) -> str:
    """Return the commit of a folder as a version of PEP 440, after the newest tag; empty if git does not answer."""
    from packaging.version import InvalidVersion, Version

    described = (ask(folder, "describe", "--tags", "--long", "--always") or "").strip()
    tag, _, since = described.rpartition("-g")[0].rpartition("-")
    commit = described.rpartition("-g")[2]
    for start in re.finditer(r"(?<![\d.])\d", tag):  # such as v1.2 or mylib-1.2
        with suppress(InvalidVersion):
            found = Version(tag[start.start() :])
            return str(found) if since == "0" else f"{found.public}+{since}.g{commit}"
    return f"0.0+g{commit}" if commit else ""
