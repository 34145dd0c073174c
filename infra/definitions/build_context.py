"""Build context of the image: the files that .dockerignore allows, a tag that follows from them, and a zip of them."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from infra.errors import Refusal

DOCKERFILE, IGNORE = "docker/Dockerfile", ".dockerignore"
TAG_PREFIX, TAG_DIGITS = "build-", 32
FILE, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120777
# The earliest time of a zip.
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class File:
    """A file by its path in the context; the content of a symbolic link is its target. Git keeps the same modes."""

    path: str
    mode: int
    content: bytes


@dataclass(frozen=True)
class BuildContext:
    """Files of an image, in the order of their paths."""

    files: Sequence[File]

    @cached_property
    def tag(self) -> str:
        """Tag of the image: a hash of the paths, modes and contents, which is the same on every machine.

        Times, owners and the other mode bits are left out. The Dockerfile is among the files, and so its base image.
        """
        whole = hashlib.sha256()
        for file in self.files:
            line = f"{file.mode:o} {hashlib.sha256(file.content).hexdigest()} {file.path}\0"
            whole.update(line.encode())
        return TAG_PREFIX + whole.hexdigest()[:TAG_DIGITS]

    def zip(self) -> bytes:
        """Archive from which Info-ZIP restores modes and symbolic links."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in self.files:
                info = zipfile.ZipInfo(file.path, EPOCH)
                info.create_system = 3  # Unix
                info.external_attr = file.mode << 16
                archive.writestr(info, file.content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


def read(root: Path) -> BuildContext:
    """Read the build context in a folder."""
    path = IGNORE
    try:
        rules = _rules((root / IGNORE).read_text())
        found = [DOCKERFILE, *_allowed(root, rules)]
        files = []
        for path in sorted({IGNORE, *found}):
            path.encode()
            files.append(_file(root, path))
    except (OSError, UnicodeError) as error:
        raise Refusal("image", f"{path!r} of the build context can't be read ({error}); check it in {root}") from error
    return BuildContext(files)


def _file(root: Path, path: str) -> File:
    place = root / path
    mode = place.lstat().st_mode
    if stat.S_ISLNK(mode):
        return File(path, LINK, os.readlink(place).encode())
    return File(path, EXECUTABLE if mode & stat.S_IXUSR else FILE, place.read_bytes())


Rule = tuple[bool, str, re.Pattern[str]]


def _rules(text: str) -> list[Rule]:
    """Rules of a .dockerignore in their order: True if the rule allows, the pattern, and its expression.

    https://docs.docker.com/build/concepts/context/#dockerignore-files
    """
    rules = []
    for line in text.splitlines():
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        allows, pattern = pattern.startswith("!"), pattern.removeprefix("!").strip()
        pattern = str(PurePosixPath(pattern.lstrip("/")))
        # A rule for a folder is one for all that is in it.
        rules.append((allows, pattern, re.compile(f"{_expression(pattern)}(/.*)?", re.DOTALL)))
    return rules


def _expression(pattern: str) -> str:
    """Regular expression of a pattern."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translated(part: re.Match[str]) -> str:
        text = part[0]
        if text.startswith("["):
            return text
        return words.get(text) or re.escape(text.removeprefix("\\") or text)

    return re.sub(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|\\?.", translated, pattern, flags=re.DOTALL)


def _is_ignored(path: str, rules: Sequence[Rule]) -> bool:
    return next((not allows for allows, _, expression in reversed(rules) if expression.fullmatch(path)), False)


def _allowed(root: Path, rules: Sequence[Rule]) -> Iterator[str]:
    """Paths of files and symbolic links that the rules allow; empty folders are no part of the context."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        paths = {name: (here / name).as_posix() for name in (*folders, *names)}
        folders[:] = [name for name in folders if not _is_ignored(paths[name], rules) or _may_allow(paths[name], rules)]
        for name in (*links, *names):
            kind = (Path(folder) / name).lstat().st_mode
            # The builder takes neither sockets nor pipes.
            if (stat.S_ISREG(kind) or stat.S_ISLNK(kind)) and not _is_ignored(paths[name], rules):
                yield paths[name]


def _may_allow(folder: str, rules: Sequence[Rule]) -> bool:
    """True if something in an ignored folder may be allowed: other folders, such as .venv, are not searched."""
    allowed = (pattern for allows, pattern, _ in rules if allows)
    return any(each.startswith(f"{folder}/") or re.search(r"[*?\[\\]", each) for each in allowed)
