"""Options of a training script: types that check a value, and errors of one line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def fail(line: str, status: int = 2) -> NoReturn:
    """Print one line with the script's name, and exit; status 2 is an error that a restart won't fix.

    In a worker of Ray it is a RuntimeError, which Ray shows to the program.
    """
    if Path(sys.argv[0]).name == "default_worker.py":
        raise RuntimeError(line)
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(status)


class Options(argparse.ArgumentParser):
    """Parser of a script's options, which takes their descriptions from the script's docstring and their help."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown flag first: its value would be taken for an argument without a flag."""
        for word in sys.argv[1:] if args is None else args:
            if word == "--":
                break
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}; a flag of ray-on-ecs run stands before the script")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with status 2."""
        fail(message)


def whole(least: int = 1, most: int = 2**53) -> Callable[[str], int]:
    """Return a type for a whole number of at least `least` and at most `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return int(_within(text, value, least, most))

    return convert


def number(least: float = 0.0, most: float = math.inf, *, above: float | None = None) -> Callable[[str], float]:
    """Return a type for a finite number of at least `least`, or more than `above`, and at most `most`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"{text} must be more than {above:g}")
        return _within(text, value, -math.inf if above is not None else least, most)

    return convert


def _within(text: str, value: float, least: float, most: float) -> float:
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least:g}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text} must be at most {most:g}")
    return value


def source(*built_in: str, or_file: bool = False) -> Callable[[str], str]:
    """Return a type for one of these names, an existing folder, or file with `or_file`, or s3://bucket/prefix."""

    def convert(text: str) -> str:
        if text in built_in or "://" in text:
            return text
        path = Path(text).expanduser()
        if not path.is_dir() and not (or_file and path.is_file()):
            names = ", ".join([*built_in, "a folder", *(["a file"] if or_file else []), "or s3://bucket/prefix"])
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}")
        return str(path)

    return convert
