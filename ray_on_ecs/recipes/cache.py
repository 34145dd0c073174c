"""Folder of this machine for downloaded and prepared data sets."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ray-on-ecs"
