"""Lines of the package's log, for tests of objects that write some."""

import logging

from ray_on_ecs.logs import PACKAGE


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def collect_lines() -> list[str]:
    """Return a list that gets each line from now on; the next `logs.set_up` ends that."""
    handler = _Lines()
    PACKAGE.addHandler(handler)
    return handler.lines
