"""The user's code of a run: an archive by content in the storage, which each node unpacks into the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import open_filesystem, short_reason
from ray_on_ecs.run import code_archive
from ray_on_ecs.run.code_files import check_size, list_code
from ray_on_ecs.run.config import ScriptConfig
from ray_on_ecs.tracking.storage import RunStorage

# On one machine larger files are linked, and not copied.
LARGE_BYTES = 32 * 2**20
# A folder with more files is linked as a whole.
MAX_LINKS = 10_000
# Of what is left out, for the line of a script that misses it.
MAX_NAMES = 50
BAR_SECONDS = 2.0


@dataclass(frozen=True)
class Code:
    """The code of a run.

    Attributes:
        name: The name of the user's folder.
        archive: The address of the archive.
        links: Where files of the user's folder are that the archive lacks, by their names: on one machine alone.
    """

    name: str
    archive: str
    links: Mapping[str, str] = field(default_factory=dict)

    def place(self, folder: Path) -> None:
        """Write the code into a new folder.

        Raises:
            OSError: The archive can't be read, or the folder not be written.
        """
        base, _, digest = self.archive.removesuffix(code_archive.SUFFIX).rpartition(f"/{code_archive.FOLDER}/")
        filesystem, path = open_filesystem(base)
        code_archive.fetch(filesystem, path, digest, folder)
        for name, original in self.links.items():
            _link(Path(original), folder / name)


def store(config: ScriptConfig, storage: RunStorage, say: Callable[[str], None]) -> ScriptConfig:
    """Store the files of the folder with the code beside the runs; return the settings with the archive and the commit.

    In a storage that is a folder, large files are left out: they are linked.

    Args:
        config: The settings.
        storage: The folder of a run.
        say: Gets lines about what is not taken.

    Raises:
        UsageError: There is too much of it, or the storage can't be written.
    """
    files = list_code(config.folder, config.include, config.exclude, is_limited=not storage.is_local)
    for line in files.describe_left_out():
        say(line)
    if storage.is_local:
        files = replace(files, files=tuple(each for each in files.files if each.size <= LARGE_BYTES))
        if not (config.include or config.exclude):
            check_size(config.folder, files.files)
    base = storage.uri.removesuffix(f"/{storage.run_name}")
    try:
        with progress("uploading the code", sum(each.size for each in files.files)) as on_bytes:
            digest = code_archive.store(files, storage.filesystem, storage.base, on_bytes)
    except OSError as cause:
        raise UsageError(f"--storage-path: the code can't be stored in {base} ({short_reason(cause)})") from cause
    code = f"{config.folder.name or 'code'}={base}/{code_archive.FOLDER}/{digest}{code_archive.SUFFIX}"
    git = code_archive.revision(config.folder)
    revision = git["GIT_COMMIT"] + ("-dirty" if git["GIT_DIRTY"] == "1" else "") if git else None
    largest = sorted(
        (each for each in files.left_out if each.is_ignored and each.name.isprintable()), key=lambda each: -each.size
    )
    left_out = tuple(each.name for each in largest[:MAX_NAMES])
    return replace(config, code=code, revision=revision, left_out=left_out)


def find(config: ScriptConfig, storage: RunStorage, *, is_one_node: bool) -> Code:
    """Return the code of a run, with links to what its archive lacks where that is on this machine.

    Args:
        config: The settings.
        storage: The run's folder.
        is_one_node: Whether the workers are on this machine, so that ignored files are there, too.
    """
    name, _, archive = str(config.code).partition("=")
    if not storage.is_local or not config.folder.is_dir():
        return Code(name, archive)
    files = list_code(config.folder, config.include, config.exclude, is_limited=False)
    large = [each.name for each in files.files if each.size > LARGE_BYTES]
    ignored = [each.name.rstrip("/") for each in files.left_out if each.is_ignored] if is_one_node else []
    return Code(name, archive, {name: str(config.folder / name) for name in [*large, *ignored]})


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


def _link(original: Path, target: Path) -> None:
    """Link a file, or all files of a folder, so that new ones stay in the run's own folder."""
    files = [original] if not original.is_dir() else _files(original)
    if len(files) > MAX_LINKS:
        files = [original]
    for each in files:
        link = target / each.relative_to(original)
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(each)


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, _, names in os.walk(folder):
        found += [Path(parent, name) for name in names]
        if len(found) > MAX_LINKS:
            break
    return found
