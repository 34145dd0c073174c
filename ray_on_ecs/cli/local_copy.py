"""A run's folder on this machine: copies of its files, its links, the curves, and its report, rendered here."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich import filesize

from ray_on_ecs.cli.screen import note, notes
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.names import is_inside, leads_out, make_link, make_way
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

    from ray_on_ecs.storage.run_storage import RunStorage

COPIES_AT_ONCE = 8
CHUNK_BYTES = 8 * 2**20
# A run that is under way replaces its files, perhaps while they are read.
ATTEMPTS = 3
# Of a folder that is made here: neither git nor the upload of a script's folder takes what was fetched.
IGNORE = "*\n"


def is_here(target: Path, path: str, info: FileInfo, written_at: int | None) -> bool:
    """Return whether a file has been copied, and has not changed in the storage since."""
    try:
        status = os.stat(target / path, follow_symlinks=not _is_of_script(path))
    except OSError:
        return False
    is_current = status.st_size == info.size and status.st_mtime_ns >= (written_at or info.mtime_ns or 0)
    return is_current and stat.S_ISREG(status.st_mode)


def check_room(target: Path, needed: int) -> None:
    """Raise UsageError unless the target's disk has room for these bytes."""
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


def copy_all(storage: RunStorage, target: Path, files: dict[str, FileInfo], written_at: dict[str, int]) -> None:
    """Copy files of a run, several at once; `written_at` has the times at which a script wrote its files.

    Raises:
        OSError: A file can't be read or written.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    make_folder(target)
    places = {path: _place(target, path) for path in files}
    stop = threading.Event()
    with (
        Progress(*columns, TimeRemainingColumn(), console=notes, transient=True, disable=not notes.is_terminal) as bar,
        ThreadPoolExecutor(COPIES_AT_ONCE) as pool,
    ):
        task = bar.add_task(f"fetching {storage.run_name}", total=sum(info.size for info in files.values()))
        copies = [
            pool.submit(
                _copy, storage, places[path], info, written_at.get(path), lambda size: bar.advance(task, size), stop
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


def _is_of_script(path: str) -> bool:
    """Return whether a path is where a fetch makes links; all other links are the user's, and are followed."""
    return path.partition("/")[0].casefold() == layout.FILES_FOLDER


def _place(target: Path, path: str) -> Path:
    """Return where a file is written, after making the folder for it."""
    if _is_of_script(path):
        top, _, rest = path.partition("/")
        place = Path(os.path.realpath(target / top), rest)
        make_way(place.parents[rest.count("/")], place)
    else:
        place = Path(os.path.realpath(target / path))
        place.parent.mkdir(parents=True, exist_ok=True)
    return place


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


def make_links(target: Path, links: Mapping[str, str]) -> list[str]:
    """Make the links of a run, and return the names of those that are left out or deleted.

    Below a `files` that the user has made a link, they might lead to files of the user.
    """
    top = target / layout.FILES_FOLDER
    if top.is_symlink():
        return list(links)
    left_out = []
    for name, text in links.items():
        path = target / name
        make_way(top, path)
        if path.is_symlink():
            path.unlink()
        if not path.exists() and not make_link(path, text):
            left_out.append(name)
    return left_out + _delete_links_out(target)


def _delete_links_out(target: Path) -> list[str]:
    """Delete the links that lead out of the folder over others, perhaps of an earlier fetch; return their names.

    A link whose own text leads out was not fetched: it is the user's.
    """

    def links_out() -> list[str]:
        inside = os.walk(target / layout.FILES_FOLDER)
        paths = [Path(parent, name) for parent, folders, names in inside for name in (*folders, *names)]
        links = [(path, path.relative_to(target).as_posix()) for path in paths if path.is_symlink()]
        return [name for path, name in links if not is_inside(path, target) and not leads_out(name, os.readlink(path))]

    deleted: list[str] = []
    while found := links_out():  # each link that is made or deleted may change where others lead
        for name in found:
            (target / name).unlink()
        deleted += found
    return deleted


def delete_false_curves(target: Path) -> list[str]:
    """Delete the curves, and return their name, unless they are a picture in which a browser runs nothing."""
    path = target / layout.CURVES
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if file.read(len(layout.PNG)) == layout.PNG:
            return []
    Path(os.path.realpath(path)).unlink()  # a link is the user's
    return [layout.CURVES]


def write_report(storage: RunStorage, target: Path) -> bool:
    """Write the report as it is rendered here; return False if it is here already, or can't be made."""
    from ray_on_ecs.tracking.report import render_here

    path = target / layout.REPORT
    try:
        page = render_here(storage)
    except UsageError as cause:
        note(str(cause))
        return False
    if path.is_file() and path.read_bytes() == page:
        return False
    make_folder(target)
    _place(target, layout.REPORT).write_bytes(page)
    return True


def unreadable(storage: RunStorage, cause: Exception) -> ResourceError:
    """Return the error of a run that can't be copied."""
    return ResourceError(f"run {storage.run_name} can't be copied ({one_line(cause)}); the same command continues")
