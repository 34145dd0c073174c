"""Errors with which a script ends: one line on standard error, and an exit status."""

from typing import Any

import pytest


def refused(capsys: pytest.CaptureFixture[str], function: Any, *arguments: Any, status: int = 2) -> str:
    """The line of the error, after the name of the script."""
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    assert end.value.code == status
    [line] = capsys.readouterr().err.splitlines()
    return line.partition("error: ")[2]
