"""Snapshots of a run's folder in the storage: a manifest names the files, and is written when all of them are there.

`files.json` is the last complete snapshot. Objects that it names are not overwritten before the next one is written, so
a file that was replaced is stored below `versions/` first, and stands under `files/` at the run's end. Logs alone are
stored in place.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pyarrow import fs

from ray_on_ecs.filesystem import copy_to_disk
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

FORMAT = 1
COPIES_AT_ONCE = 8
# S3 copies a larger object in parts alone.
MAX_COPY_BYTES = 5 * 2**30
CHUNK_BYTES = 16 * 2**20
ESCAPED = re.compile(r"[\x00-\x1f\x7f\udc80-\udcff]|%(?=[0-9A-F]{2})")


@dataclass(frozen=True)
class KeptFile:
    """A file of a snapshot, or a symbolic link.

    Attributes:
        key: The path of its object in the run's folder; empty for a link.
        size: Its size in bytes.
        written_at: When it was last written (ns since 1970).
        mode: Its permissions.
        link: The target of a link, or None.
        is_log: Whether it is stored in place while it grows, so that its object may be newer than the snapshot.
        node: The rank of the node whose script wrote it.
    """

    key: str = ""
    size: int = 0
    written_at: int = 0
    mode: int = 0o644
    link: str | None = None
    is_log: bool = False
    node: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The files of a run's folder at one moment, by their paths in it.

    Attributes:
        files: The files.
        left_out: Lines that name what was not kept.
        folder: The folder of the run's folder below which they stand at the run's end.
    """

    files: Mapping[str, KeptFile] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    folder: str = layout.FILES_FOLDER

    @property
    def keys(self) -> set[str]:
        """The objects of the files."""
        return {each.key for each in self.files.values() if each.key}


def read_snapshot(storage: RunStorage, name: str = layout.FILES) -> Snapshot:
    """Return the last complete snapshot; an empty one before the first.

    Raises:
        OSError: The storage can't be read.
        UsageError: The manifest is broken.
    """
    document = storage.read_json(name)
    if document is None:
        return Snapshot()
    files = {path: KeptFile(**values) for path, values in document["files"].items()}
    return Snapshot(files, tuple(document["left_out"]), document["folder"])


def write_snapshot(storage: RunStorage, snapshot: Snapshot, name: str = layout.FILES) -> None:
    """Make this the last complete snapshot; all its files must have been stored."""
    empty = asdict(KeptFile())
    files = {path: _without(asdict(each), empty) for path, each in sorted(snapshot.files.items())}
    document = {"format": FORMAT, "folder": snapshot.folder, "left_out": list(snapshot.left_out), "files": files}
    storage.write_json(name, document)


def _without(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != defaults[name]}


def key_of(folder: str, name: str) -> str:
    """Return the key of a file in a folder of the run's folder.

    Bytes that are not UTF-8 are written as %XX, and so are control characters, which a list of objects can't hold, and
    a % that would look like these.
    """
    return f"{folder}/{ESCAPED.sub(lambda each: f'%{ord(each[0]) & 0xFF:02X}', name)}"


def restore(
    storage: RunStorage, files: Mapping[str, KeptFile], folder: Path, here: Mapping[str, Path] | None = None
) -> None:
    """Write the files of a snapshot into a folder, links last.

    Args:
        storage: The run's folder.
        files: The files.
        folder: The folder.
        here: Files of the snapshot that are on this disk, and are moved.

    Raises:
        OSError: A file can't be read from the storage, or not be written here.
    """
    here = here or {}
    fetched: dict[Path, fs.FileInfo] = {}
    for name, kept in files.items():
        _make_room(folder, folder / name)
        if name in here:
            os.replace(here[name], folder / name)
        elif kept.link is None:
            fetched[folder / name] = _info(storage, kept)
    copy_to_disk(storage.filesystem, fetched)
    for name, kept in files.items():
        path = folder / name
        if kept.link is not None:
            path.symlink_to(kept.link)
        elif path in fetched:
            path.chmod(kept.mode)
            os.utime(path, ns=(kept.written_at, kept.written_at))


def _info(storage: RunStorage, kept: KeptFile) -> fs.FileInfo:
    path = storage.path(kept.key)
    if kept.is_log and (found := storage.filesystem.get_file_info(path)).is_file:
        return found
    return fs.FileInfo(path, type=fs.FileType.File, size=kept.size)


def _make_room(folder: Path, path: Path) -> None:
    """Make the folders of a path, and remove what is in its place."""
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        if (folder / parent).is_symlink() or (folder / parent).is_file():
            (folder / parent).unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def publish(storage: RunStorage) -> Snapshot:
    """Bring each file of the last snapshot to its place, and delete the stored files that it does not name.

    Returns:
        The last snapshot, with the files in their places.

    Raises:
        OSError: The storage can't be read or written; the snapshot is complete all the same.
    """
    snapshot = read_snapshot(storage)
    taken = snapshot.keys
    places = {name: key_of(snapshot.folder, name) for name, kept in snapshot.files.items() if kept.key}
    moved = {name: key for name, key in places.items() if key not in taken}
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        list(threads.map(lambda name: _copy(storage, snapshot.files[name], moved[name]), moved))
    if moved:
        files = {**snapshot.files, **{name: replace(snapshot.files[name], key=key) for name, key in moved.items()}}
        snapshot = replace(snapshot, files=files)
        write_snapshot(storage, snapshot)
    delete_others(storage, snapshot)
    return snapshot


def delete_others(storage: RunStorage, snapshot: Snapshot) -> None:
    """Delete the stored files that a snapshot does not name, except below `files/` where the script itself writes.

    Raises:
        OSError: The storage can't be read or written.
    """
    folders = [layout.VERSIONS_FOLDER, *([layout.FILES_FOLDER] if snapshot.folder == layout.FILES_FOLDER else [])]
    for folder in folders:
        delete_keys(storage, _stored(storage, folder) - snapshot.keys)
    if not any(key.startswith(f"{layout.VERSIONS_FOLDER}/") for key in snapshot.keys):
        storage.delete_folder(layout.VERSIONS_FOLDER)  # on a disk the empty folders are left
    storage.delete_folder(layout.PARTS_FOLDER)


def _stored(storage: RunStorage, folder: str) -> set[str]:
    if not storage.is_local:
        return {f"{folder}/{name}" for name in storage.files(folder)}
    # Not what is behind links: where a script has worked in the folder itself, these lead to the user's own files.
    base = Path(storage.path())
    return {str(Path(above, name).relative_to(base)) for above, _, names in os.walk(base / folder) for name in names}


def delete_keys(storage: RunStorage, keys: Iterable[str]) -> None:
    """Delete stored files."""
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        list(threads.map(storage.delete, keys))


def copy_on_disk(source: Path, target: Path) -> None:
    """Make a file that is not written any more stand at another path, too: as a hard link where the disk has these."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _copy(storage: RunStorage, kept: KeptFile, key: str) -> None:
    """Copy an object within the storage, unless the script has written it in its place."""
    source, target = storage.path(kept.key), storage.path(key)
    if storage.is_local:
        found = os.lstat(target) if os.path.lexists(target) else None
        if found is None or (found.st_size, found.st_mtime_ns) != (kept.size, kept.written_at):
            _make_room(Path(storage.path()), Path(target))
            copy_on_disk(Path(source), Path(target))
            os.utime(target, ns=(kept.written_at, kept.written_at))
    elif kept.size <= MAX_COPY_BYTES:
        storage.filesystem.copy_file(source, target)
    else:
        with storage.open_reader(kept.key) as reader, storage.open_writer(key) as writer:
            shutil.copyfileobj(reader, writer, CHUNK_BYTES)
