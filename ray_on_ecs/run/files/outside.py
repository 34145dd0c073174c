"""Large files that a script writes outside of its folder: they are not kept, and a line at the end names them.

They are found by what the script's processes have open, every two seconds, and, as most files are written faster, by
what is new in the home folder, its `.cache` and the temporary folder, unless another program wrote it. One that is
written faster, in a folder that was there before the run, is not found.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ray_on_ecs.private_folder import temporary
from ray_on_ecs.run.files.scan import TICK_SECONDS

MIN_BYTES = 2**20
# That are looked at when files are searched, and of the files that are remembered until then.
MAX_ENTRIES = 20_000
TEMPORARY = "/tmp"  # nosec B108 # some programs write there even if TMPDIR is another folder
SYSTEM = ("/dev/", "/proc/", "/sys/", "/run/")
# Names of caches and of folders of other programs, and of temporary folders in the home or the temporary folder.
OTHERS = re.compile(
    r"(?!\.cache$).*cache.*|\.?(ray|nv|triton|keras)|huggingface|torch|torch(inductor)?_.*|triton|pip|uv|wandb|matplotlib"
    r"|nltk_data|(datasets|models|spaces)--.*|\.?ray-on-ecs.*",
    re.IGNORECASE,
)
TEMPORARY_NAMES = re.compile(r"(pip|pytest|pymp|systemd|snap)-.*|tmp[a-z0-9_]{8}", re.IGNORECASE)
# Variables that name caches.
CACHES = re.compile(r"(?!XDG_)\w*CACHE\w*|(HF|TORCH|TRITON|NLTK|KERAS)_(HOME|DATA|DIR)|WANDB_\w*DIR")


class OutsideFiles:
    """Files outside of a run's folders, from now on.

    Args:
        own: The folders whose files are kept, or are of the run itself.
        variables: The script's environment variables.

    Attributes:
        seen: The files that the script has had open for writing.
    """

    def __init__(self, own: Iterable[Path], variables: Mapping[str, str]) -> None:
        self._since = time.time() - TICK_SECONDS
        self._home = os.path.realpath(variables.get("HOME") or os.path.expanduser("~"))
        temp = variables.get("TMPDIR") or tempfile.gettempdir()
        self._roots = [f"{os.path.realpath(root)}/" for root in (f"{self._home}/.cache", self._home, temp, TEMPORARY)]
        caches = [path for name, path in variables.items() if CACHES.fullmatch(name) and os.path.isabs(path)]
        others = [*map(str, own), str(temporary()), sys.prefix, *caches]
        self._others = (*SYSTEM, *(f"{os.path.realpath(path)}/" for path in others))
        self._told = self._top_entries()
        self.seen: set[str] = set()

    def see(self, path: str) -> None:
        """Remember a file that the script has open for writing."""
        if len(self.seen) < MAX_ENTRIES and not self._is_of_others(path):
            self.seen.add(path)

    def find(self) -> list[str]:
        """Return large new files or their folders, with sizes; below folders that existed before only if seen."""
        tops: dict[str, set[str]] = {top: set() for top in self._top_entries() - self._told}
        for path in self.seen:
            tops.setdefault(self._top(path), set()).add(path)
        found: list[str] = []
        left = iter(range(MAX_ENTRIES))
        # A folder elsewhere may be a disk with millions of files.
        for top in sorted(tops, key=lambda top: (not top.startswith(tuple(self._roots)), top)):
            paths = {top, *tops[top], *_below(top, left)}
            sizes = {path: self._size(path) for path in paths if not self._is_of_others(path)}
            large = [path for path, size in sizes.items() if size]
            if large:
                name = os.path.commonpath(large)
                shown = f"~{name[len(self._home) :]}" if name.startswith(f"{self._home}/") else name
                doubt = "" if tops[top] else ", unless another program wrote it"
                found.append(f"{shown} ({sum(sizes.values()) / 2**20:,.0f} MiB{doubt})")
        self._told |= tops.keys()
        self.seen.clear()
        return sorted(found)

    def _top_entries(self) -> set[str]:
        roots, found = {root.rstrip("/") for root in self._roots}, set[str]()
        for root in roots:
            with suppress(OSError):
                found.update(f"{root}/{name}" for name in os.listdir(root))
        return found - roots

    def _top(self, path: str) -> str:
        """Return the entry of a root that has a file, or the file's folder elsewhere."""
        for root in self._roots:
            if path.startswith(root):
                return root + path.removeprefix(root).partition("/")[0]
        return os.path.dirname(path)

    def _is_of_others(self, path: str) -> bool:
        root = next((root for root in self._roots if path.startswith(root)), "")
        names = path.removeprefix(root).split("/")
        is_temporary = bool(root and TEMPORARY_NAMES.fullmatch(names[0]))
        return is_temporary or path.startswith(self._others) or any(map(OTHERS.fullmatch, names))

    def _size(self, path: str) -> int:
        with suppress(OSError):
            status = os.lstat(path)
            is_new = status.st_uid == os.getuid() and status.st_mtime >= self._since
            if stat.S_ISREG(status.st_mode) and is_new and status.st_size >= MIN_BYTES:
                return status.st_size
        return 0


def _below(top: str, left: Iterator[int]) -> Iterator[str]:
    """Yield the files below a folder, as long as entries are left."""
    folders = [top]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if next(left, None) is None:
                    return
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path
