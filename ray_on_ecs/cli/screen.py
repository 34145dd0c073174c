"""What commands print: results on stdout, where they can be read by programs, and everything else on stderr."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)


def note(line: str) -> None:
    """Print a line about what the command does."""
    notes.print(line, markup=False)


def print_json(document: Any) -> None:
    """Print a result for programs."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
