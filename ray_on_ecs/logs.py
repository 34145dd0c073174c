"""Log of the package's own processes: its level by `RAY_ON_ECS_LOG`, its lines as users and tests know them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping

VARIABLE = "RAY_ON_ECS_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PACKAGE = logging.getLogger("ray_on_ecs")
# Module names and times only with debug. UTC, as in the run's documents.
DETAILS = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s "


class _Output(logging.Handler):
    """Standard output and error, looked up for each line, since Ray and tests replace `sys.stdout`."""

    errors_from = logging.ERROR
    mask: Callable[[str], str] = str

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= self.errors_from else sys.stdout
        try:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            line = self.mask(self.format(record)).encode(encoding, "backslashreplace").decode(encoding)
            stream.write(f"{line}\n")
            stream.flush()  # else the line comes after later ones of the script
        except (OSError, ValueError):  # a closed stream or a full disk must not end a run
            pass


_OUTPUT = _Output()


def set_up(name: str = "", variables: Mapping[str, str] | None = None, *, errors_from: int = logging.ERROR) -> None:
    """Configure this process's log; a second call replaces the first.

    The name is the prefix of each line; empty in a worker, whose lines stand among its script's. The run's variables
    win over this process's. Lines go to standard error from the level `errors_from` on.
    """
    text = (variables or {}).get(VARIABLE) or os.environ.get(VARIABLE) or "info"
    level = LEVELS.get(text.strip().lower())
    details = DETAILS if level == logging.DEBUG else ""
    formatter = logging.Formatter(f"{details}{name and f'{name}: '}%(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    _OUTPUT.setFormatter(formatter)
    _OUTPUT.errors_from = errors_from
    PACKAGE.handlers[:] = [_OUTPUT]
    PACKAGE.propagate = False  # Ray and users configure the root logger
    PACKAGE.setLevel(level or logging.INFO)
    if level is None:
        os.environ.pop(VARIABLE, None)  # the processes that this one starts need not repeat the line
        if name:
            PACKAGE.warning(f"{VARIABLE}: {text!r:.60} is not a level; give debug, info, warning or error")


def mask_by(mask: Callable[[str], str]) -> None:
    """Let a function remove secrets from each line."""
    _OUTPUT.mask = mask
