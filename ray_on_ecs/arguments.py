"""Paths in the arguments of a script: `$INPUT_DATA` and the like, which are known on the node.

Only the runner's own names are expanded; all other text reaches the script as it is typed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath

from ray_on_ecs.errors import UsageError

INPUT = "INPUT_"
OF_RUN = ("RUN_DIR", "RUN_NAME", "RUN_URI")
# $NAME or ${NAME}, but not \$NAME and $$NAME.
VARIABLE = re.compile(r"(?<![\\$])\$(?:(\w+)|\{(\w+)\})")
SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def expand(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command with the values of these variables, also within words."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[2], found[0])

    return tuple(word if of_shell else VARIABLE.sub(value, word) for word, of_shell in _words(command))


def check(command: Sequence[str], names: Collection[str]) -> None:
    """Raise UsageError if an argument names an input that the run does not have."""
    for word, of_shell in _words(command):
        for found in () if of_shell else VARIABLE.finditer(word):
            name = found[1] or found[2]
            if name.startswith(INPUT) and name not in names and name != INPUT:
                given = ", ".join(f"${each}" for each in names if each.startswith(INPUT)) or "no input"
                raise UsageError(
                    f"--input: the argument {word!r} names ${name}, and the run has {given}; "
                    f"add --input {name.removeprefix(INPUT)}=URI"
                )


def _words(command: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the words, and whether a word is a program for a shell, which expands the variables itself."""
    has_shell = False
    before = ""
    for word in command:
        yield word, has_shell and re.fullmatch(r"-\w*c", before) is not None
        has_shell = has_shell or PurePath(word).name in SHELLS
        before = word
