"""Snapshots of a run's files in its storage, with a manifest that is written last.

`files.json` is the manifest of the last complete snapshot. Its objects are not overwritten before the next manifest is
written: a replaced file is first stored below `versions/`, and moves to `files/` at the run's end.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.names import conflicts, folders_of, is_inside, is_refused, make_link, make_way
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import StoredFile
from ray_on_ecs.storage.filesystem import copy_to_disk
from ray_on_ecs.storage.run_storage import RunStorage

FORMAT = 1
COPIES_AT_ONCE = 8
# Linux's limit for the target of a link; some disks have a lower one.
MAX_LINK_BYTES = 4095
# The folders that have the objects of a snapshot.
STORED = (layout.FILES_FOLDER, layout.VERSIONS_FOLDER)
ESCAPED = re.compile(r"[\x00-\x1f\x7f\udc80-\udcff]|%(?=[0-9A-F]{2})")


@dataclass(frozen=True)
class KeptFile:
    """File of a snapshot, or a symbolic link."""

    key: str = ""  # of its object in the run's folder; empty for a link
    size: int = 0
    written_at: int = 0  # ns since 1970
    mode: int = 0o644
    link: str | None = None  # the target
    is_log: bool = False  # it was being written at that moment
    node: int = 0  # the rank of the node whose script wrote it


@dataclass(frozen=True)
class Snapshot:
    """Files of a script at one moment, by their paths in its folder."""

    files: Mapping[str, KeptFile] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # lines that name files that were not stored, and the reason
    folder: str = layout.FILES_FOLDER  # that has the files at the run's end
    # Names in the manifest that count as absent: a disk can't have them, git would read them, links lead to files of
    # others, or their entries do not describe files.
    refused: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        """Keys of the files' objects."""
        return {file.key for file in self.files.values() if file.key}


def read_snapshot(storage: RunStorage, name: str = layout.FILES) -> Snapshot:
    """Return the last complete snapshot, or an empty one before the first; UsageError for a broken manifest."""
    document = storage.read_json(name)
    if document is None:
        return Snapshot()
    try:
        folder = document["folder"]
        _check_key(folder, (layout.FILES_FOLDER,))
        entries = dict(document["files"].items())
    except (AttributeError, LookupError, TypeError, ValueError) as cause:
        raise UsageError(f"{storage.uri}/{name} is broken ({one_line(cause)}); use another run name") from cause
    files = {path: file for path, values in entries.items() if (file := _kept_file(values)) and not is_refused(path)}
    keys = {file.key for file in files.values() if file.key}
    absent = keys_outside(storage, keys)
    if storage.is_local:  # where a folder, a socket or the like may be in the place of a file
        paths = {key: storage.path(key) for key in keys}
        absent |= {key for key, path in paths.items() if os.path.exists(path) and not os.path.isfile(path)}
    files = {path: file for path, file in files.items() if file.key not in absent}
    left_out = document.get("left_out")
    left_out = tuple(map(str, left_out)) if isinstance(left_out, list) else ()
    return Snapshot(files, left_out, folder, tuple(sorted(entries.keys() - files.keys())))


def _kept_file(values: Any) -> KeptFile | None:
    """Return a file of a manifest, which others than the product may have written; None if it can't be one."""
    try:
        file = KeptFile(**{each.name: values[each.name] for each in fields(KeptFile) if each.name in values})
        if file.link is None:
            _check_key(file.key, STORED)
            is_possible = "/" in file.key
        else:
            is_possible = not file.key and "\0" not in file.link and 0 < len(os.fsencode(file.link)) <= MAX_LINK_BYTES
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    numbers = (file.size, file.mode, file.node, file.written_at)
    is_number = all(type(number) is int and abs(number) < 2**63 for number in numbers)
    if not is_possible or not is_number or min(numbers[:-1]) < 0 or not isinstance(file.is_log, bool):
        return None  # a time may be before 1970
    return replace(file, mode=file.mode & 0o777)


def _check_key(key: str, folders: Collection[str]) -> None:
    """Raise ValueError or AttributeError unless a key is text that stays in one of these folders."""
    top, *parts = key.split("/")
    os.fsencode(key)  # raises UnicodeEncodeError, a ValueError
    if top not in folders or not {"", ".", ".."}.isdisjoint(parts) or "\0" in key:
        raise ValueError(f"{key!r} is not in {' or '.join(f'{folder}/' for folder in folders)}")


def keys_outside(storage: RunStorage, keys: Collection[str]) -> set[str]:
    """Return the keys that links on a disk lead out of the run's folder, to files of others."""
    if not storage.is_local:
        return set()
    base = Path(storage.path())
    paths = {path for key in keys for path in (key, *folders_of(key))}
    links = {path for path in paths if os.path.islink(base / path)}  # False if the disk can't have such a path
    below = {key for key in keys if links and not links.isdisjoint((key, *folders_of(key)))}
    return {key for key in below if not is_inside(base / key, base)}


def write_snapshot(storage: RunStorage, snapshot: Snapshot, name: str = layout.FILES) -> None:
    """Make this the last complete snapshot; all its files must have been stored."""
    defaults = asdict(KeptFile())
    files: dict[str, dict[str, Any]] = {}
    for path, file in sorted(snapshot.files.items()):
        files[path] = {field: value for field, value in asdict(file).items() if value != defaults[field]}
    document = {"format": FORMAT, "folder": snapshot.folder, "left_out": list(snapshot.left_out), "files": files}
    storage.write_json(name, document)


def key_of(folder: str, name: str) -> str:
    """Return the key of a file in a folder of the run's folder.

    Control characters, which S3's list of objects can't hold, and bytes that are not UTF-8 are escaped as %XX, and so
    is a % in front of two hexadecimal digits.
    """
    return f"{folder}/{ESCAPED.sub(lambda match: f'%{ord(match[0]) & 0xFF:02X}', name)}"


def restore(
    storage: RunStorage, files: Mapping[str, KeptFile], folder: Path, here: Mapping[str, Path] | None = None
) -> list[str]:
    """Write the files of a snapshot into a folder, links last; files that are already `here` on this disk are moved.

    Returns the names of files that this disk can't have beside the others; they are left out.
    """
    here = here or {}
    left_out = conflicts(files, folder)
    files = {name: file for name, file in files.items() if name not in left_out}
    stored = stored_files(storage, {file.key for name, file in files.items() if file.key and name not in here})
    fetched: dict[Path, StoredFile] = {}
    for name, file in files.items():
        if file.link is None:
            path = folder / name
            _make_room(folder, path)
            if name in here:
                os.replace(here[name], path)
            else:
                info = stored.get(file.key)
                if info is None:
                    raise FileNotFoundError(f"{storage.uri}/{file.key} is missing")
                if info.size < file.size:
                    raise OSError(f"{storage.uri}/{file.key} has {info.size:,} of {file.size:,} bytes")
                fetched[path] = info._replace(size=file.size)
    copy_to_disk(storage.store, fetched)
    for name, file in files.items():
        if (path := folder / name) in fetched:
            path.chmod(file.mode)
            os.utime(path, ns=(file.written_at, file.written_at))
    for name, file in files.items():
        if file.link is not None:
            path = folder / name
            _make_room(folder, path)
            if not make_link(path, file.link):
                left_out.append(name)
    return left_out


def stored_files(storage: RunStorage, keys: Collection[str]) -> dict[str, StoredFile]:
    """Return those of these keys that the storage has, in a bucket from lists; OSError if the storage can't be read."""
    if storage.is_local:
        return {key: info for key in sorted(keys) if (info := storage.find(key))}
    folders = STORED if keys else ()
    return {f"{folder}/{name}": info for folder in folders for name, info in storage.files(folder).items()}


def _make_room(folder: Path, path: Path) -> None:
    """Create the parent folders of a path, and delete whatever is in the way."""
    make_way(folder, path, over_files=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def publish(storage: RunStorage) -> Snapshot:
    """Copy the files of the last snapshot to their final keys, and delete stored files that are not in it.

    Returns the last snapshot, with the final keys. It stays complete if the storage fails.
    """
    snapshot = read_snapshot(storage)
    taken = snapshot.keys
    final: dict[str, KeptFile] = {}
    for name, file in snapshot.files.items():
        key = key_of(snapshot.folder, name)
        if file.key and key not in taken:
            final[name] = replace(file, key=key)
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        list(threads.map(lambda name: _copy(storage, snapshot.files[name], final[name].key), final))
    if final:
        snapshot = replace(snapshot, files={**snapshot.files, **final})
        write_snapshot(storage, snapshot)
    delete_others(storage, snapshot)
    return snapshot


def delete_others(storage: RunStorage, snapshot: Snapshot) -> None:
    """Delete the stored files that are not in a snapshot, except below `files/` if the script itself writes there."""
    folders = [layout.VERSIONS_FOLDER]
    if snapshot.folder == layout.FILES_FOLDER:
        folders.append(layout.FILES_FOLDER)
    for folder in folders:
        delete_keys(storage, _stored_keys(storage, folder) - snapshot.keys)
    if not any(key.startswith(f"{layout.VERSIONS_FOLDER}/") for key in snapshot.keys):
        storage.delete_folder(layout.VERSIONS_FOLDER)  # a disk still has its empty folders
    storage.delete_folder(layout.PARTS_FOLDER)


def _stored_keys(storage: RunStorage, folder: str) -> set[str]:
    if not storage.is_local:
        return {f"{folder}/{name}" for name in storage.files(folder)}
    # Links were not stored: they lead to the user's files. os.walk follows only one at its start.
    base = Path(storage.path())
    found = os.walk(base / folder) if not (base / folder).is_symlink() else ()
    paths = [path for parent, _, names in found for name in names if not (path := Path(parent, name)).is_symlink()]
    return {str(path.relative_to(base)) for path in paths}


def delete_keys(storage: RunStorage, keys: Iterable[str]) -> None:
    """Delete stored files."""
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        list(threads.map(storage.delete, keys))


def _copy(storage: RunStorage, file: KeptFile, key: str) -> None:
    """Copy an object within the storage, unless the script has already written it to its final key."""
    source = StoredFile(storage.path(file.key), file.size)
    target = storage.path(key)
    if storage.is_local:
        status = os.lstat(target) if os.path.lexists(target) else None
        if status is None or (status.st_size, status.st_mtime_ns) != (file.size, file.written_at):
            _make_room(Path(storage.path()), Path(target))
            storage.store.copy(source, target)
            os.utime(target, ns=(file.written_at, file.written_at))
    else:
        storage.store.copy(source, target)
