"""A run's folder on this machine: copies of its files, its links, the curves, and its report, rendered here."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from rich import filesize
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ray_on_ecs.cli.screen import note, notes
from ray_on_ecs.errors import UsageError
from ray_on_ecs.names import is_inside, leads_out, make_link, make_way
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import Changed, StoredFile, make_ignored, nearest, part_of
from ray_on_ecs.storage.filesystem import copy_each
from ray_on_ecs.storage.run_storage import RunStorage

# A run that is under way replaces its files, perhaps while they are read.
ATTEMPTS = 3


def is_here(target: Path, path: str, info: StoredFile, written_at: int | None) -> bool:
    """Return whether a file has been copied, and has not changed in the storage since."""
    try:
        status = os.stat(target / path, follow_symlinks=not _is_of_script(path))
    except OSError:
        return False
    is_current = status.st_size == info.size and status.st_mtime_ns >= (written_at or info.mtime_ns)
    return is_current and stat.S_ISREG(status.st_mode)


def check_room(target: Path, needed: int) -> None:
    """Raise UsageError unless the target's disk has room for these bytes."""
    free = shutil.disk_usage(nearest(target.absolute())).free
    if needed > free:
        raise UsageError(
            f"{target} has room for {filesize.decimal(free)}, and the files take {filesize.decimal(needed)}; "
            "free some space, or fetch fewer files with --only"
        )


def make_folder(target: Path) -> None:
    """Make the folder of a run, in one that git and uploads ignore if there is none yet."""
    make_ignored(target.parent)
    target.mkdir(exist_ok=True)


def copy_all(
    storage: RunStorage, target: Path, files: dict[str, StoredFile], written_at: dict[str, int]
) -> dict[str, OSError]:
    """Copy files of a run, several at once, with the times at which a script wrote them.

    Returns the files that were deleted or replaced meanwhile, and are not copied.
    """
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    make_folder(target)
    places = {path: _place(target, path) for path in files}
    parts = {part_of(place): path for path, place in places.items()}
    missed: dict[str, OSError] = {}
    try:
        with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
            task = bar.add_task(f"fetching {storage.run_name}", total=sum(info.size for info in files.values()))
            sources = {part: files[path] for part, path in parts.items()}
            with closing(copy_each(storage.store, sources, lambda size: bar.advance(task, size))) as copies:
                for part, error in copies:
                    path = parts[part]
                    if isinstance(error, FileNotFoundError | Changed):
                        missed[path] = error
                    elif error:
                        raise error
                    else:
                        time = written_at.get(path) or files[path].mtime_ns
                        os.utime(part, ns=(time, time))
                        part.replace(places[path])
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return missed


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
    deleted: list[str] = []
    while True:  # each link that is deleted may change where others lead
        before = len(deleted)
        for path in (target / layout.FILES_FOLDER).rglob("*"):
            name = path.relative_to(target).as_posix()
            if path.is_symlink() and not is_inside(path, target) and not leads_out(name, os.readlink(path)):
                path.unlink()
                deleted.append(name)
        if len(deleted) == before:
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
