"""Output of the commands: results on stdout, for programs to read, and everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console

from ray_on_ecs.tracking.shown_log import printable, shows_colours

out = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)


def note(line: str) -> None:
    """Print a line about what the command does."""
    notes.print("\n".join(map(printable, line.split("\n"))), markup=False)


def show(lines: Iterable[str]) -> None:
    """Print lines of a log, with their colours only on a terminal."""
    has_colours = shows_colours(sys.stdout)
    for line in lines:
        out.out(printable(line, has_colours=has_colours), highlight=False)


def print_json(document: Any) -> None:
    """Print a result for programs."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
