"""The user's code of a run: an archive by content in the storage, which each node unpacks into the run's folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import code_archive
from ray_on_ecs.run.code_files import check_size, list_code
from ray_on_ecs.storage.filesystem import open_filesystem, short_reason
from ray_on_ecs.storage.run_storage import RunStorage

# In a storage that is a folder of this machine larger files are linked, and not copied.
LARGE_BYTES = 32 * 2**20
# Names in the job's command: of what is linked, and of what is left out, for the line of a script that misses it.
MAX_LINKS, MAX_NAMES = 500, 50
BAR_SECONDS = 2.0


@dataclass(frozen=True)
class Code:
    """The code of a run.

    Attributes:
        name: The name of the user's folder.
        archive: The address of the archive.
        links: The files that the archive lacks because they are on this machine, by their names.
    """

    name: str
    archive: str
    links: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> Code:
        """Return the code that settings name, which `store` has returned."""
        archive, _, name = str(config.code).rpartition(f"{code_archive.SUFFIX}=")
        return cls(name, archive + code_archive.SUFFIX, {link: config.folder / link for link in config.link})

    def place(self, folder: Path) -> None:
        """Write the code into a new folder.

        Raises:
            OSError: The archive or a file can't be read, or the folder not be written.
        """
        base, _, digest = self.archive.removesuffix(code_archive.SUFFIX).rpartition(f"/{code_archive.FOLDER}/")
        filesystem, path = open_filesystem(base)
        code_archive.fetch(filesystem, path, digest, folder)
        for name, original in self.links.items():
            if not original.exists():
                raise FileNotFoundError(f"{original} is not on this node; give s3://bucket/prefix as --storage-path")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(original)


def store(config: RunConfig, storage: RunStorage, say: Callable[[str], None], *, links: bool) -> RunConfig:
    """Store the files of the working directory next to the runs; return the settings with the archive and the commit.

    Args:
        config: The settings.
        storage: The folder of a run.
        say: Shows a line about files that are not uploaded.
        links: True to store links to large files, if the storage is a folder that all nodes see.

    Raises:
        UsageError: There is too much of it, or the storage can't be written.
    """
    folder = config.folder
    results = Path(storage.base)  # that may lie in the folder with the code
    inside = (_literal(results.relative_to(folder)),) if storage.is_local and results.is_relative_to(folder) else ()
    files = list_code(folder, config.include, config.exclude, never=inside)
    for line in files.describe_left_out():
        say(line)
    large = tuple(file.name for file in files.files if links and storage.is_local and file.size > LARGE_BYTES)
    if len(large) > MAX_LINKS:
        raise UsageError(
            f"--working-dir: {folder} has {len(large):,} files of more than {LARGE_BYTES / 2**20:.0f} MiB, and at most "
            f"{MAX_LINKS} can be linked; leave them out by --exclude, and give their folder as --input"
        )
    files = replace(files, files=tuple(file for file in files.files if file.name not in large))
    if not (config.include or config.exclude):
        check_size(folder, files.files)
    base = storage.uri.removesuffix(f"/{storage.run_name}")
    try:
        with progress("uploading the code", sum(file.size for file in files.files)) as on_bytes:
            digest = code_archive.store(files, storage.filesystem, storage.base, on_bytes)
    except OSError as cause:
        raise UsageError(f"--storage-path: the code can't be stored in {base} ({short_reason(cause)})") from cause
    git = code_archive.revision(folder)
    ignored = [file for file in files.left_out if file.is_ignored and file.name.isprintable()]
    ignored.sort(key=lambda file: -file.size)
    revision = None
    if git:
        revision = git["GIT_COMMIT"] + {"0": "", "1": "-dirty", "": "-unknown"}[git.get("GIT_DIRTY", "")]
    return replace(
        config,
        code=f"{base}/{code_archive.FOLDER}/{digest}{code_archive.SUFFIX}={folder.name or 'code'}",
        link=large,
        left_out=tuple(file.name for file in ignored[:MAX_NAMES]),
        revision=revision,
    )


def _literal(path: Path) -> str:
    """Return a pattern as in .gitignore that only matches this path."""
    return "/" + re.sub(r"([\\*?\[\]! #])", r"\\\1", path.as_posix()) + "/"


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[int], None]]:
    """Yield a function that takes numbers of bytes; a bar shows their sum on a terminal if it takes long."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, begun_at = bar.add_task(what, total=total), time.monotonic()

    def on_bytes(size: int) -> None:
        bar.advance(task, size)
        if time.monotonic() - begun_at > BAR_SECONDS:
            bar.start()

    try:
        yield on_bytes
    finally:
        bar.stop()
