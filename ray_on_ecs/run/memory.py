"""Kills of processes by the kernel for want of memory, as it counts them for this process's control group."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Begins the last words of a script that was ended so.
OUT_OF_MEMORY = "the kernel ended it, because memory was full"


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many there were so far: of the control group (version 2 or 1), else of the machine; 0 without Linux.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    groups = _read(root / "proc/self/cgroup")
    files = [root / "proc/vmstat"]
    for controllers, path in re.findall(r"(?m)^\d+:([^:]*):/?(.*)$", groups):
        if not controllers:  # in a container the path may be that on the host
            files = [root / "sys/fs/cgroup" / path / "memory.events", root / "sys/fs/cgroup/memory.events", *files]
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            files = [folder / path / "memory.oom_control", folder / "memory.oom_control", *files]
    counts = [re.search(r"(?m)^oom_kill (\d+)$", _read(file)) for file in files]
    return next((int(count[1]) for count in counts if count), 0)


def killed_words(largest: int) -> str:
    """Return the last words of a script; `largest` is the resident memory of its largest process (ru_maxrss)."""
    gib = largest / (2**30 if sys.platform == "darwin" else 2**20)
    return f"{OUT_OF_MEMORY} (its largest process had {gib:.1f} GiB)" if largest else OUT_OF_MEMORY


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
