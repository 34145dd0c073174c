"""Output of the commands: results on stdout, for programs to read, and everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.style import Style
from rich.text import Text

from ray_on_ecs.tracking.shown_log import printable, shows_colours

# Of the lines of a log, whose own colours are shown.
LOG = Style(meta={"log": True})


class Screen(Console):
    """Console on which no text changes the terminal, whatever a command prints: names and logs may be other users'.

    Attributes:
        ends_without_reader: The command ends if the program to which its output is piped has ended.
    """

    ends_without_reader = True

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Return a status line; a text in it is not markup."""
        return super().status(Text(status) if isinstance(status, str) else status, **options)

    def on_broken_pipe(self) -> None:
        """See Console, which ends the command; what is printed from here on goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        if self.ends_without_reader:
            raise SystemExit(1)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(map(_harmless, buffer))


def _harmless(segment: Segment) -> Segment:
    if segment.control:  # rich's own movements of the cursor
        return segment
    has_colours = segment.style is not None and "log" in segment.style.meta
    return Segment(printable(segment.text, has_colours=has_colours), segment.style)


out = Screen(soft_wrap=True)
notes = Screen(stderr=True, soft_wrap=True)


def note(line: str) -> None:
    """Print a line about what the command does."""
    notes.print(line)


def show(lines: Iterable[str]) -> None:
    """Print lines of a log, with their colours only on a terminal."""
    style = LOG if shows_colours(sys.stdout) else ""
    for line in lines:
        out.print(Text(line, style))


def print_json(document: Any) -> None:
    """Print a result for programs; it may have dataclasses."""
    click.echo(json.dumps(document, indent=2, allow_nan=False, default=asdict))
