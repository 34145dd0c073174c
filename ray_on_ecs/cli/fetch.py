"""`ray-on-ecs fetch`: copy a run's folder, or what is new in it, to this machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import filesize

from ray_on_ecs.cli.completion import complete_run
from ray_on_ecs.cli.screen import note, notes, out, print_json
from ray_on_ecs.cluster.clusters import Cluster, on_cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.tracking import layout

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

    from ray_on_ecs.tracking.snapshot import Snapshot
    from ray_on_ecs.tracking.storage import RunStorage

FOLDER = "runs"
COPIES_AT_ONCE = 8
CHUNK_BYTES = 8 * 2**20
# A run that is under way replaces its files, perhaps while they are read.
ATTEMPTS = 3
# The manifest of a script's files, and the folders that hold them.
OF_SNAPSHOTS = (layout.FILES, layout.FILES_FOLDER, layout.VERSIONS_FOLDER, layout.PARTS_FOLDER)
# What runs leave in their folders for themselves: the lock, and files that are being written.
INTERNAL = (layout.LOCK, f"{layout.LOCK}.*", ".write-check", ".snapshot/*", "*.part")
NAMES_SHOWN = 8
# Of a folder that is made here: neither git nor the upload of a script's folder takes what was fetched.
IGNORE = "*\n"


@dataclass(frozen=True)
class Fetched:
    """Fetched files of a run.

    Attributes:
        folder: The folder with the run's files.
        files: Requested files that exist, by their paths in the folder.
        copied: Those that were not there before.
        size: The bytes of all of them.
    """

    folder: Path
    files: list[str]
    copied: list[str]
    size: int

    def __str__(self) -> str:
        """Say what is where."""
        tops = list(dict.fromkeys(f"{name.partition('/')[0]}{'/' * ('/' in name)}" for name in self.files))
        names = ", ".join(tops[:NAMES_SHOWN]) + (", …" if len(tops) > NAMES_SHOWN else "")
        new = "nothing new" if not self.copied else f"{len(self.copied)} new"
        return f"{self.folder}: {counted(len(self.files), 'file')}, {filesize.decimal(self.size)}, {new}: {names}"


@click.command("fetch")
@click.argument("run", shell_complete=complete_run)
@click.argument("folder", metavar="[DIR]", default=FOLDER)
@click.option("--checkpoints", is_flag=True, help="Copy the checkpoints, too.")
@click.option(
    "--only", metavar="GLOB", multiple=True, help="Copy only matching files, such as '*.json'; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print the fetched files as JSON.")
@on_cluster
def command(cluster: Cluster, run: str, folder: str, checkpoints: bool, only: tuple[str, ...], as_json: bool) -> None:
    """Copy RUN into DIR/RUN (default: runs/RUN): its results, logs and files. Existing files stay."""
    fetched = copy_run(cluster, run, Path(folder), checkpoints=checkpoints, only=only)
    if as_json:
        document = {"run": run, "folder": str(fetched.folder), "files": fetched.files, "copied": fetched.copied}
        print_json({**document, "bytes": fetched.size})
    else:
        out.print(str(fetched), markup=False)


def fetch_run(
    cluster: Cluster, name: str, folder: str | Path, checkpoints: bool = False, only: Sequence[str] = ()
) -> Path:
    """Copy a run into a folder of its name (see `copy_run`), say so on stderr, and return that folder."""
    fetched = copy_run(cluster, name, Path(folder), checkpoints=checkpoints, only=only)
    note(str(fetched))
    return fetched.folder


def copy_run(
    cluster: Cluster, name: str, folder: Path, *, checkpoints: bool = False, only: Sequence[str] = ()
) -> Fetched:
    """Copy a run into a folder of its name.

    Files that are there with the size and the time that they have in the storage are left; others appear when they are
    complete, with that time. That of a file that a script wrote is when it did, wherever it is stored now.

    Args:
        cluster: Whose run it is.
        name: The run.
        folder: Target folder.
        checkpoints: True to fetch checkpoints, too.
        only: Patterns of the paths that are wanted; none for all.

    Raises:
        UsageError: The run or the file does not exist, or the disk lacks room for it.
        ResourceError: It can't be read.
    """
    target = folder.expanduser() / name
    storage = find_run(cluster, name)
    copied: list[str] = []
    for _ in range(ATTEMPTS):  # a run that is under way replaces its files
        files, links, written_at = _files(storage)
        wanted = {path: info for path, info in files.items() if _is_wanted(path, checkpoints, only)}
        new = [path for path, info in wanted.items() if not _is_here(target / path, info, written_at.get(path))]
        if not new:
            break
        try:
            _check_room(target, sum(wanted[path].size for path in new))
            _copy_all(storage, target, {path: wanted[path] for path in new}, written_at)
        except OSError as cause:
            raise _unreadable(storage, cause) from cause
        copied += new
    if only and not wanted:
        raise UsageError(
            f"--only: no file of run {name} matches {' or '.join(only)}; {cluster.command(f'fetch {name}')} copies all"
        )
    for path, text in links.items():
        if _is_wanted(path, checkpoints, only):
            _link(target / path, text)
    here = [path for path in wanted if (target / path).exists()]
    return Fetched(target, here, list(dict.fromkeys(copied)), sum(wanted[path].size for path in here))


def _files(storage: RunStorage) -> tuple[dict[str, FileInfo], dict[str, str], dict[str, int]]:
    """Return all files of a run by their paths in its folder, the targets of its symbolic links, and times (ns).

    The files of the script are from the last snapshot, with their times.
    """
    from pyarrow import fs

    from ray_on_ecs.filesystem import list_files
    from ray_on_ecs.tracking.snapshot import read_snapshot

    start = len(storage.path()) + 1
    try:
        snapshot = read_snapshot(storage)
        tops = storage.filesystem.get_file_info(fs.FileSelector(storage.path(), allow_not_found=True))
        others = [each for each in tops if each.base_name not in OF_SNAPSHOTS]
        found = [
            each for top in others for each in ([top] if top.is_file else list_files(storage.filesystem, top.path))
        ]
        stored = {each.path[start:]: each for each in _stored(storage, snapshot)}
    except OSError as cause:
        raise _unreadable(storage, cause) from cause
    kept = {f"{layout.FILES_FOLDER}/{name}": each for name, each in snapshot.files.items()}
    files = {each.path[start:]: each for each in found}
    files |= {path: stored[each.key] for path, each in kept.items() if each.key in stored}
    links = {path: each.link for path, each in kept.items() if each.link is not None}
    return files, links, {path: each.written_at for path, each in kept.items() if each.written_at and not each.is_log}


def _stored(storage: RunStorage, snapshot: Snapshot) -> list[FileInfo]:
    """Return the files that a snapshot names: in a bucket from lists, and on a disk without following its links."""
    from ray_on_ecs.filesystem import list_files

    if storage.is_local:
        found = storage.filesystem.get_file_info([storage.path(key) for key in sorted(snapshot.keys)])
        return [each for each in found if each.is_file]
    folders = (layout.FILES_FOLDER, layout.VERSIONS_FOLDER) if snapshot.files else ()
    return [each for folder in folders for each in list_files(storage.filesystem, storage.path(folder))]


def _link(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.symlink_to(text)


def _is_wanted(path: str, checkpoints: bool, only: Sequence[str]) -> bool:
    top, *rest = path.split("/")
    if ".." in path.split("/") or (top != layout.FILES_FOLDER and any(fnmatch(path, each) for each in INTERNAL)):
        return False
    if rest and top == layout.CHECKPOINTS_FOLDER and not checkpoints:
        return False
    return not only or any(fnmatch(path, pattern) for pattern in only)


def _is_here(file: Path, info: FileInfo, written_at: int | None) -> bool:
    try:
        found = file.stat()
    except OSError:
        return False
    return found.st_size == info.size and found.st_mtime_ns >= (written_at or info.mtime_ns or 0)


def _check_room(target: Path, needed: int) -> None:
    nearest = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.exists())
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise UsageError(
            f"{target} has room for {filesize.decimal(free)}, and the files take {filesize.decimal(needed)}; "
            "free some space, or fetch fewer files with --only"
        )


def make_folder(target: Path) -> None:
    """Make the folder of a run, in one that git and uploads ignore if there is none yet."""
    if not target.parent.exists():
        target.parent.mkdir(parents=True)
        (target.parent / ".gitignore").write_text(IGNORE)
    target.mkdir(exist_ok=True)


def _copy_all(storage: RunStorage, target: Path, files: dict[str, FileInfo], written_at: dict[str, int]) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    make_folder(target)
    stop = threading.Event()
    with (
        Progress(*columns, TimeRemainingColumn(), console=notes, transient=True, disable=not notes.is_terminal) as bar,
        ThreadPoolExecutor(COPIES_AT_ONCE) as pool,
    ):
        task = bar.add_task(f"fetching {storage.run_name}", total=sum(info.size for info in files.values()))
        copies = [
            pool.submit(
                _copy, storage, target / path, info, written_at.get(path), lambda size: bar.advance(task, size), stop
            )
            for path, info in files.items()
        ]
        try:
            for each in copies:
                each.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(
    storage: RunStorage,
    file: Path,
    info: FileInfo,
    written_at: int | None,
    on_bytes: Callable[[int], object],
    stop: threading.Event,
) -> None:
    """Copy a file, again if it was replaced meanwhile; one that was deleted is left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    path = info.path[len(storage.path()) + 1 :]
    try:
        for _ in range(ATTEMPTS):
            _copy_once(storage, path, part, on_bytes, stop)
            found = storage.filesystem.get_file_info(storage.path(path))
            if stop.is_set() or not found.is_file:
                return
            if found.size == info.size and found.mtime_ns <= info.mtime_ns:  # S3 lists whole seconds
                break
            info = found
        time = written_at or info.mtime_ns
        os.utime(part, ns=(time, time))
        part.replace(file)
    except FileNotFoundError:
        if storage.exists(path):
            raise
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def _copy_once(
    storage: RunStorage, path: str, part: Path, on_bytes: Callable[[int], object], stop: threading.Event
) -> None:
    with storage.open_reader(path) as source, part.open("wb") as copy:
        while not stop.is_set() and (chunk := source.read(CHUNK_BYTES)):
            copy.write(chunk)
            on_bytes(len(chunk))


def _unreadable(storage: RunStorage, cause: OSError) -> Exception:
    return ResourceError(f"run {storage.run_name} can't be copied ({one_line(cause)}); the same command continues")
