"""Rows of the page of all runs: state, cost, settings and curves of each, as JSON can hold them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any

from ray_on_ecs.cluster.history import READERS, Folders, RunInfo
from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.rules import finite
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.curves import Curves, sample, thin
from ray_on_ecs.tracking.places import in_words
from ray_on_ecs.tracking.shown_log import printable

# Points of a curve: many in a page of few runs, and fewer in one of many, which then has some megabytes.
POINTS, FEWEST_POINTS, POINTS_OF_ALL = 400, 60, 120_000
MAX_SETTINGS = 100
# Settings that are the run's name, or in a column.
LEFT_OUT = ("run_name", "command", "storage_path")
CODE_DIGITS = 12
UNKNOWN = "(unknown)"

Row = dict[str, Any]


def read_rows(
    folders: Folders, runs: Sequence[RunInfo], named: Collection[str], advance: Callable[[], None]
) -> tuple[list[Row], dict[str, OSError]]:
    """Return a row for each run, and by name the errors of those that could not be read; a broken document is empty.

    The curves of `named` runs have all points. `advance` is called after each run.
    """
    points = max(min(POINTS_OF_ALL // max(len(runs), 1), POINTS), FEWEST_POINTS)
    errors: dict[str, OSError] = {}

    def read(run: RunInfo) -> Row:
        document: Mapping[str, Any] = {}
        curves = Curves()
        storage, files = folders.storage.sibling(run.name), folders.files.get(run.name, {})
        try:
            if files:
                is_named = run.name in named
                curves = thin(sample(storage, files, is_whole=is_named), POINTS if is_named else points)
                document = storage.read_json(layout.SETTINGS) or {}
        except UsageError:  # the document is broken
            pass
        except OSError as cause:
            errors[run.name] = cause
        advance()
        try:
            return row(run, document, curves)
        except Exception:  # others may have written the document
            return row(run, {}, curves)

    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, runs)), errors


def row(run: RunInfo, document: Mapping[str, Any], curves: Curves) -> Row:
    """Return the row of a run; `document` is its `run.json`, which others may have written."""
    given = document.get("settings")
    given = given if isinstance(given, dict) else {}
    command = given.get("command")
    command = [text(word) for word in command] if isinstance(command, list) else []
    last = curves.last or {name: finite(value) for name, value in (run.metrics or {}).items()}
    return {
        "name": run.name,
        "owner": text(run.owner) or UNKNOWN,
        "script": (command or [UNKNOWN])[0],
        "command": one_line(shlex.join(command)),
        "state": text(run.state),
        "step": run.step,
        "started": run.started,
        "month": run.started[:7] if run.started else UNKNOWN,
        "seconds": run.seconds,
        "workers": run.workers,
        "gpu": text(run.gpu),
        "pool": text(in_words(run)),
        "cost": run.cost_usd,
        "url": run.url,
        "last": {text(name): value for name, value in last.items()},
        "settings": dict([*_settings(given), *_arguments(command[1:]), *_code(document.get("code"))][:MAX_SETTINGS]),
        "steps": curves.steps,
        "times": curves.seconds,
        "curves": {text(name): values for name, values in curves.values.items()},
    }


def text(value: Any) -> str:
    """Return a value on one line, without marks that turn the direction of text; empty for None."""
    if isinstance(value, list):
        return one_line(" ".join(map(text, value)))
    return "" if value is None else one_line(printable(str(value)))


def _settings(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        if name not in LEFT_OUT and value not in (None, []):
            yield text(name).replace("_", " "), text(value)


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return the flags of a script with their values, and then its other arguments."""
    flags: dict[str, str] = {}
    others: list[str] = []
    flag = ""
    for word in words:
        if re.match("--?[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            flags[flag] = value
            flag = "" if equals else flag
        elif flag:
            flags[flag] = one_line(f"{flags[flag]} {word}")
        else:
            others.append(word)
    yield from flags.items()
    if others:
        yield "arguments", one_line(" ".join(others))


def _code(code: Any) -> Iterator[tuple[str, str]]:
    """Return the digest and the commit of a run's code."""
    if not isinstance(code, dict):
        return
    if isinstance(archive := code.get("archive"), str):
        yield "code", text(PurePath(archive).name[:CODE_DIGITS])
    if isinstance(git := code.get("git"), dict) and git.get("GIT_COMMIT"):
        yield "commit", text(git["GIT_COMMIT"])[:CODE_DIGITS]
