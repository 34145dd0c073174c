"""Lines of a script's output that belong to a Python traceback: their numbers are those of code, not metrics."""

from __future__ import annotations

import re

from ray_on_ecs.run.crashes import FRAME
from ray_on_ecs.run.last_words import EXCEPTION, NAMED_ERROR, TRACEBACK

# Before each line of a process: torch's and torchrun's, and Ray's, which has a colour.
PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\[\w+\]: ?|\([^()]*\bpid=[^()]*\)(?:\x1b\[[0-9;]*m)* )")
WARNING = re.compile(r"\S+:\d+: \w*Warning: ")
REPEATED = "[Previous line repeated"
# The margin of an exception group, and the frame that rich draws.
MARGINS = ("|", "+", "╭", "│", "╰")
FRAMED_HEADER = re.compile(rf"[ |+╭│╰─-]*(?:Exception Group )?{re.escape(TRACEBACK)}")


class TracebackLines:
    """Reader of one output, line by line."""

    def __init__(self) -> None:
        self._has_header = False
        self._has_margin = False
        self._indent: int | None = None  # of the last frame, or of the header; None outside of a traceback

    def has(self, line: str) -> bool:
        """Return whether the next line of the output is a part of a traceback, or of a warning with its source line."""
        line = PREFIX.sub("", line).rstrip()
        indent = len(line) - len(line.lstrip())
        has_margin = line.lstrip().startswith(MARGINS)
        if FRAMED_HEADER.match(line):
            self._has_header, self._has_margin, self._indent = True, has_margin, -1
        elif FRAME.match(line):
            self._indent = indent
        elif WARNING.match(line):
            self._has_header, self._indent = False, 0
        elif self._indent is None:
            return False
        elif self._has_margin and has_margin:
            pass
        elif not self._has_margin and (indent > max(self._indent, 0) or line.lstrip().startswith(REPEATED)):
            if self._indent == 0:  # the source line of a warning
                self._indent = None
        else:
            is_exception = (EXCEPTION if self._has_header else NAMED_ERROR).match(line)
            self._has_header, self._has_margin, self._indent = False, False, None
            return bool(is_exception)
        return True
