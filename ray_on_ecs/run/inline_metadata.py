"""Inline metadata of a script: the packages that its first lines name, and the Python that it needs.

https://packaging.python.org/en/latest/specifications/inline-script-metadata/
"""

from __future__ import annotations

import platform
import re
import tomllib
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import UsageError

BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+)^# ///$")


def dependencies(script: Path) -> list[str]:
    """Return the packages of a script, as lines of a requirements file; UsageError if its metadata are broken."""
    lines = _read(script).get("dependencies", [])
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UsageError(f"SCRIPT: dependencies in the inline metadata of {script.name} must be a list of texts")
    return lines


def check_python(script: Path) -> None:
    """Raise UsageError if a script needs another Python than this one."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    needed, own = _read(script).get("requires-python", ""), platform.python_version()
    try:
        fits = SpecifierSet(str(needed)).contains(own, prereleases=True)
    except InvalidSpecifier:
        fits = False
    if not fits:
        fault = f"requires-python of {script.name} is {needed!r}, and the run's Python is {own}"
        raise UsageError(f"SCRIPT: {fault}; change that line, or give --requirements FILE")


def _read(script: Path) -> dict[str, Any]:
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the upload names it
        return {}
    blocks = BLOCK.findall(text.replace("\r\n", "\n"))
    try:
        if len(blocks) > 1:
            raise ValueError("there are two blocks")
        return tomllib.loads("\n".join(line[2:] for block in blocks for line in block.splitlines()))
    except ValueError as cause:
        raise UsageError(f"SCRIPT: the inline metadata of {script.name} can't be used ({cause})") from cause
