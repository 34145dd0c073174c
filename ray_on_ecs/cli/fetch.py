"""`ray-on-ecs fetch`: copy a run's folder, or what is new in it, to this machine."""

from __future__ import annotations

import hashlib
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

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.completion import complete_run
from ray_on_ecs.cli.screen import note, notes, out, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.names import fault_of, is_inside, is_of_git, leads_out, make_way
from ray_on_ecs.tracking import layout

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

    from ray_on_ecs.tracking.storage import RunStorage

FOLDER = "runs"
COPIES_AT_ONCE = 8
CHUNK_BYTES = 8 * 2**20
# A run that is under way replaces its files, perhaps while they are read.
ATTEMPTS = 3
# The manifest of a script's files, and the folders that hold them.
OF_SNAPSHOTS = (layout.FILES, layout.FILES_FOLDER, layout.VERSIONS_FOLDER, layout.PARTS_FOLDER)
# What runs leave in their folders for themselves: the lock, and files that are being written.
INTERNAL = (layout.LOCK, f"{layout.LOCK}.*", ".write-check*", ".snapshot/*", "*.part")
NAMES_SHOWN = 8
# Of a folder that is made here: neither git nor the upload of a script's folder takes what was fetched.
IGNORE = "*\n"


@dataclass(frozen=True)
class Fetched:
    """Fetched files of a run.

    Attributes:
        folder: The folder with the run's files.
        files: Requested files that exist, by their paths in the folder.
        copied: The new ones among them.
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

    Files that already have the size and the time of the storage are skipped; others appear when they are complete, with
    that time. The time of a script's file is when the script wrote it, wherever it is stored now.

    Args:
        cluster: The cluster of the run.
        name: The run.
        folder: Target folder.
        checkpoints: True to fetch checkpoints, too.
        only: Patterns of the paths to fetch; none for all.

    Raises:
        UsageError: The run or the file does not exist, or the disk lacks room for it.
        ResourceError: It can't be read.
    """
    target = folder.expanduser() / name
    storage = find_run(cluster, name)
    copied: list[str] = []
    for _ in range(ATTEMPTS):  # a run that is under way replaces its files
        listing = _list(storage)
        requested = {path: info for path, info in listing.files.items() if _is_requested(path, checkpoints, only)}
        new = {
            path: info
            for path, info in requested.items()
            if not _is_here(target / path, info, listing.written_at.get(path))
        }
        if not new:
            break
        try:
            _check_room(target, sum(info.size for info in new.values()))
            _copy_all(storage, target, new, listing.written_at)
        except OSError as cause:
            raise _unreadable(storage, cause) from cause
        copied += new
    if only and not requested:
        raise UsageError(
            f"--only: no file of run {name} matches {' or '.join(only)}; {cluster.command(f'fetch {name}')} copies all"
        )
    links = {path: text for path, text in listing.links.items() if _is_requested(path, checkpoints, only)}
    for path, text in links.items():
        _link(target, path, text)
    refused = [*listing.refused, *(path for path in links if not is_inside(target / path, target))]
    for path in refused[len(listing.refused) :]:
        (target / path).unlink(missing_ok=True)
    if refused:
        more = f" and {len(refused) - NAMES_SHOWN} more" if len(refused) > NAMES_SHOWN else ""
        names = ", ".join(map(repr, refused[:NAMES_SHOWN]))
        note(f"left out, as they could change files elsewhere, or can't be files here: {names}{more}")
    here = [path for path in requested if (target / path).exists()]
    return Fetched(target, here, list(dict.fromkeys(copied)), sum(requested[path].size for path in here))


@dataclass(frozen=True)
class _Listing:
    """Content of a run's folder.

    Attributes:
        files: The files by their paths in the folder.
        links: The targets of the symbolic links.
        written_at: The times at which a script wrote its files, in nanoseconds.
        refused: Names that a disk can't have, files of git, and links out of the folder.
    """

    files: dict[str, FileInfo]
    links: dict[str, str]
    written_at: dict[str, int]
    refused: list[str]


def _list(storage: RunStorage) -> _Listing:
    """List a run's folder; the files of the script are from the last snapshot."""
    from pyarrow import fs

    from ray_on_ecs.filesystem import list_files
    from ray_on_ecs.tracking.snapshot import read_snapshot, stored_files

    start = len(storage.path()) + 1
    try:
        snapshot = read_snapshot(storage)
        tops = storage.filesystem.get_file_info(fs.FileSelector(storage.path(), allow_not_found=True))
        files: dict[str, FileInfo] = {}
        for top in tops:
            if top.base_name not in OF_SNAPSHOTS:
                infos = [top] if top.is_file else list_files(storage.filesystem, top.path)
                files |= {info.path[start:]: info for info in infos}
        stored = stored_files(storage, snapshot.keys)
    except OSError as cause:
        raise _unreadable(storage, cause) from cause
    links, written_at = {}, {}
    for name, entry in snapshot.files.items():
        path = f"{layout.FILES_FOLDER}/{name}"
        if entry.key in stored:
            files[path] = stored[entry.key]
        if entry.link is not None:
            links[path] = entry.link
        if entry.written_at and not entry.is_log:
            written_at[path] = entry.written_at
    refused = sorted(name for name in (*files, *links) if fault_of(name) or is_of_git(name))
    refused += sorted(name for name, text in links.items() if leads_out(name, text) and name not in refused)
    for name in refused:
        files.pop(name, None)
        links.pop(name, None)
    return _Listing(files, links, written_at, refused)


def _link(target: Path, name: str, text: str) -> None:
    """Make a link of the run, which leads to another place in the folder."""
    path = target / name
    make_way(target, path)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.symlink_to(text)


def _is_requested(path: str, checkpoints: bool, only: Sequence[str]) -> bool:
    top, *rest = path.split("/")
    if top != layout.FILES_FOLDER and any(fnmatch(path, pattern) for pattern in INTERNAL):
        return False
    is_checkpoint = top == layout.CHECKPOINTS_FOLDER or any(map(layout.STEP_FOLDER.fullmatch, rest))
    if rest and is_checkpoint and top not in layout.NO_CHECKPOINTS and not checkpoints:
        return False
    return not only or any(fnmatch(path, pattern) for pattern in only)


def _is_here(file: Path, info: FileInfo, written_at: int | None) -> bool:
    try:
        status = file.stat()
    except OSError:
        return False
    return status.st_size == info.size and status.st_mtime_ns >= (written_at or info.mtime_ns or 0)


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
    for path in files:
        make_way(target, target / path)  # nothing is written through the links of an earlier fetch
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
            for copy in copies:
                copy.result()
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
    short = hashlib.sha256(os.fsencode(file.name)).hexdigest()[:16]  # a name may be as long as the disk allows
    part = file.with_name(f".{short}.{os.getpid()}.part")
    path = info.path[len(storage.path()) + 1 :]
    try:
        for _ in range(ATTEMPTS):
            _copy_once(storage, path, part, on_bytes, stop)
            current = storage.filesystem.get_file_info(storage.path(path))
            if stop.is_set() or not current.is_file:
                return
            if current.size == info.size and current.mtime_ns <= info.mtime_ns:  # S3 lists whole seconds
                break
            info = current
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
