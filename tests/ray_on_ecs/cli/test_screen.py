"""Text of other users on the screen."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from ray_on_ecs.cli import main, screen
from ray_on_ecs.cli.screen import Screen
from ray_on_ecs.tracking.shown_log import COLOURS
from tests.ray_on_ecs.tracking.test_shown_log import HOSTILE


def table(text: str) -> Table:
    shown = Table(text, title=text)
    shown.add_row(text)
    return shown


PRINTED: dict[str, Callable[[Screen, str], Any]] = {
    "text": lambda console, text: console.print(text),
    "styled text": lambda console, text: console.print(Text(text, "bold red")),
    "a table": lambda console, text: console.print(table(text)),
    "several": lambda console, text: console.print(text, Text(text)),
    "raw": lambda console, text: console.out(text),
    "a rule": lambda console, text: console.rule(text),
}


@pytest.mark.parametrize("kind", PRINTED)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_screen_shows_no_text_that_changes_the_terminal(kind: str, is_terminal: bool) -> None:
    for name, hostile in {**HOSTILE, "hidden text": "\x1b[8m"}.items():
        console = Screen(file=(file := io.StringIO()), force_terminal=is_terminal, _environ={"TERM": "xterm"})
        PRINTED[kind](console, f"a{hostile}b")
        shown = file.getvalue()
        assert "[8m" not in shown, name
        assert all(letter == "\n" or letter.isprintable() for letter in COLOURS.sub("", shown)), name


def test_screen_takes_no_markup_and_keeps_lines() -> None:
    console = Screen(file=(file := io.StringIO()))
    console.print("[/foo] :warning: [link=file:///etc]x[/]\n\tb")
    assert file.getvalue() == "[/foo] :warning: [link=file:///etc]x[/]\n        b\n"
    with console.status("stopping [/foo]"):
        pass


def test_errors_and_notes_are_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["runs", "--stack\x1b[2J"]) == 2
    screen.note("a\x1b]52;c;ZWNobw==\x07b\nc")
    assert "\x1b" not in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_log_has_its_own_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen.show(["\x1b[31mred\x1b[0m", "\x1b[8mhidden \x1b[2J", "[/b] plain"])
    red, hidden, plain, _ = stream.getvalue().split("\n")
    is_terminal = stream.isatty()
    assert red == ("\x1b[31mred\x1b[0m" if is_terminal else "red")
    assert hidden == ("\x1b[8mhidden \x1b[0m" if is_terminal else "hidden ")
    assert plain == "[/b] plain"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_command_runs_with_closed_streams(tmp_path: Path, closed: str) -> None:
    command = [sys.executable, "-m", "ray_on_ecs", "runs", "--local"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("full", [">/dev/full", ">/dev/full 2>/dev/full"])
def test_output_to_a_full_disk_is_one_line(tmp_path: Path, full: str) -> None:
    command = [sys.executable, "-m", "ray_on_ecs", "runs", "--local", "--json"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {full}', "sh", *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("ray-on-ecs: No space left on device: ") is (full == ">/dev/full")
