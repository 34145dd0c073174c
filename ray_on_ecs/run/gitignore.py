"""Patterns of .gitignore files, matched byte by byte as git does: https://git-scm.com/docs/gitignore.

The image does not contain git, and git does not answer for a folder outside a repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

TOKEN = re.compile(
    rb"(?P<folders>(?<![^/])\*\*+/)|(?P<rest>(?<![^/])\*\*+\Z)|(?P<many>\*+)|(?P<one>\?)"
    rb"|\[(?P<negated>[!^]?+)(?P<members>\]?+(?:\[:[^]]*:\]|\\.|[^]\\])*+)\]|\\(?P<escaped>.)|(?P<plain>[^[\\])",
    re.DOTALL,
)
MEMBER = re.compile(rb"\[:(?P<kind>[^]]*):\]|(?P<first>\\.|.)(?:-(?P<last>\\.|.))?", re.DOTALL)
# Any number of folders, as few as possible.
FOLDERS = rb"(?:[^/]*+/)*?"
LONGEST = 4096  # bytes of a pattern, as of a path on Linux
KINDS = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb"\x20\x09",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"\x21-\x7e",
    b"lower": rb"a-z",
    b"print": rb"\x20-\x7e",
    b"punct": rb"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    b"space": rb"\x09-\x0d\x20",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


class Pattern(NamedTuple):
    """One line: it decides about the paths that it matches, from the folder of its file on."""

    path: re.Pattern[bytes]
    is_ignored: bool
    only_folders: bool


class Patterns:
    """The patterns of one ignore file or option; the last one that matches decides.

    Attributes:
        source: Name of the file, for the user.
    """

    def __init__(self, lines: Iterable[bytes], folder: str, source: str) -> None:
        self._patterns = [pattern for line in lines if (pattern := _pattern(line))]
        self._patterns.reverse()
        self._start = len(os.fsencode(folder.rstrip("/"))) + 1
        self.source = source

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def decide(self, path: str, is_folder: bool) -> bool | None:
        """Return whether a path below the folder is ignored, or None if no pattern matches.

        A folder's content shares its fate; the caller, who walks from the top, does not ask about it.
        """
        name = os.fsencode(path)[self._start :]
        for pattern in self._patterns:
            if (is_folder or not pattern.only_folders) and pattern.path.fullmatch(name):
                return pattern.is_ignored
        return None


def from_options(patterns: Iterable[str], folder: str, source: str) -> Patterns:
    """Return the patterns of an option, which are relative to the user's folder."""
    return Patterns([os.fsencode(pattern) for pattern in patterns], folder, source)


def from_content(content: bytes, folder: str, source: str) -> Patterns:
    """Return the patterns of an ignore file."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return Patterns([line.removesuffix(b"\r") for line in lines], folder, source)


def _pattern(line: bytes) -> Pattern | None:
    text = line.rstrip(b" ")
    if (len(text) - len(text.rstrip(b"\\"))) % 2:
        if text == line:  # a backslash at the end escapes nothing and matches nothing
            return None
        text += b" "  # an escaped space belongs to the name
    if line.startswith(b"#") or not text or len(text) > LONGEST:
        return None
    body = text.removeprefix(b"!")
    only_folders, body = body.endswith(b"/"), body.removesuffix(b"/")
    plain = re.split(rb"[*?[\\]", body, maxsplit=1)[0] if b"/" in body else b""
    # git compares the literal prefix separately, so two asterisks right after it count as leading ones.
    path = _expression(body[len(plain) :])
    if path is None:
        return None
    start = re.escape(plain.removeprefix(b"/")) if b"/" in body else FOLDERS
    return Pattern(re.compile(start + path, re.DOTALL), not text.startswith(b"!"), only_folders)


def _expression(pattern: bytes) -> bytes | None:
    """Return a pattern as a regular expression, or None where it matches nothing, as with an open bracket.

    An asterisk that another one follows before the next `**/` takes the first match of what is between them, and never
    another one. So does what is between two `**/`, whose number of folders is fixed. Otherwise, a pattern with many of
    them would be tried in all combinations.
    """
    expression, part_of_path, between, has_star, at = b"", b"", b"", False, 0
    while at < len(pattern):
        token = TOKEN.match(pattern, at)
        part = _part(token) if token else None
        if token is None or part is None:
            return None
        if token.lastgroup == "many":
            part_of_path += rb"(?>[^/]*?%s)" % between if has_star else between
            between, has_star = b"", True
        elif token.lastgroup == "folders":
            part_of_path += (rb"[^/]*" if has_star else b"") + between
            expression += rb"(?>%s)" % part_of_path if part_of_path != FOLDERS else b""
            part_of_path, between, has_star = FOLDERS, b"", False
        else:
            between += part
        at = token.end()
    return expression + part_of_path + (rb"[^/]*" if has_star else b"") + between


def _part(token: re.Match[bytes]) -> bytes | None:
    match token.lastgroup:
        case "folders" | "many":
            return b""  # their expressions depend on what follows
        case "rest":
            return rb".*"
        case "one":
            return rb"[^/]"
        case "members":
            return _bracket(token["members"], token["negated"])
        case _:
            return re.escape(token[token.lastgroup or 0])


def _bracket(members: bytes, negated: bytes) -> bytes | None:
    parts = []
    for member in MEMBER.finditer(members):
        if member["kind"] is not None:
            if member["kind"] not in KINDS:
                return None
            parts.append(KINDS[member["kind"]])
            continue
        first, last = member["first"][-1], (member["last"] or member["first"])[-1]
        # The first end of a range counts even if it is after the last.
        parts.append(rb"\x%02x-\x%02x" % (first, last) if first <= last else rb"\x%02x" % first)
    return rb"(?!/)[%s%s]" % (b"^" if negated else b"", b"".join(parts))
