"""A folder that another process deletes at the worst moment."""

import os
from pathlib import Path
from typing import Any

import pytest


def goes_when_listed(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Delete an empty folder when it is about to be listed, after it was found."""
    original = os.scandir

    def scandir(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == place:
            place.rmdir()
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
