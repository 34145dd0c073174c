"""Files of a folder or a bucket on a node's disk, and the other way round, by parallel pieces."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from ray_on_ecs.addresses import check_address
from ray_on_ecs.errors import UsageError, counted, one_line
from ray_on_ecs.names import fault_of, folders_of
from ray_on_ecs.storage import node_cache
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.disk import PIECE_BYTES, Changed, Disk, StoredFile

# Disk space that a fetch leaves free.
SPARE_BYTES = 2 * 2**30
# Parallel requests: a single one uses a small part of a node's bandwidth.
FETCH_THREADS = 16
UPLOADS_AT_ONCE = 4
SHOWN_NAMES = 3


def open_filesystem(address: str, **options: Any) -> tuple[Disk | Bucket, str]:
    """Return the disk of a folder or the S3 of an `s3://bucket/prefix`, and the path on it, without a request.

    UsageError if it may have a key in it, which errors would show; ValueError if it has another scheme.
    """
    check_address("storage", address)
    if "://" not in address:
        return Disk(), str(Path(address).expanduser().absolute())
    if not re.fullmatch(r"s3://[^/@?]+(/[^?]*)?", address):
        raise ValueError("it is neither a folder nor a bucket")
    return Bucket(**options), address.removeprefix("s3://").rstrip("/")


def short_reason(cause: BaseException) -> str:
    """Return an error's message, or the name of its type."""
    return one_line(cause) or type(cause).__name__


def fetch(address: str, flag: str, hint: str = "give less") -> Path:
    """Return the local path of a folder or an `s3://` address; OSError if it can't be read.

    Objects are fetched to the node's disk, once for all its workers and runs: those of a prefix become a folder.
    UsageError with the flag, and the hint as a way out, if the disk is too small, the address is empty, or may have a
    key in it.
    """
    check_address(flag, address)
    if "://" not in address:
        return Path(address)
    store, path = open_filesystem(address)
    files = files_by_name(store, path)
    if not files:
        raise UsageError(f"{flag}: there is nothing at {address}")
    check_names(address, files, flag, hint)

    def make(folder: Path) -> None:
        size = sum(info.size for info in files.values())
        check_room(address, size, folder.parent, flag, hint)
        print(f"fetching {address} to this node: {counted(len(files), 'file')}, {size / 2**20:,.0f} MiB", flush=True)
        folder.mkdir()
        copy_to_disk(store, {folder / name: info for name, info in files.items()})

    version = repr([address, *((info.path, info.size, info.mtime_ns) for info in files.values())])
    folder = node_cache.cached("inputs", version, make)
    if len(files) == 1:
        [(name, info)] = files.items()
        if info.path == path:  # the address is an object
            return folder / name
    return folder


def files_by_name(store: Disk | Bucket, path: str) -> dict[str, StoredFile]:
    """Return the files below a path by their names relative to it, or the file at the path."""
    info = store.find(path) if not isinstance(store, Bucket) or "/" in path else None  # a bucket is not an object
    return {path.rpartition("/")[2]: info} if info else store.listing(path, recursive=True).files


def check_names(address: str, names: Collection[str], flag: str, hint: str) -> None:
    """Raise UsageError unless a disk can have files of these names; an S3 key may be any text."""
    folders = {folder for name in names for folder in folders_of(name)}
    faults: list[str] = []
    for name in names:
        fault = "is a folder, too" if name in folders else fault_of(name)
        if fault:
            faults.append(f"{name!r} {fault}")
    if faults:
        shown = ", ".join(faults[:SHOWN_NAMES])
        others = f", and {len(faults) - SHOWN_NAMES} more" if len(faults) > SHOWN_NAMES else ""
        raise UsageError(f"{flag}: {address} has keys that can't be files: {shown}{others}; rename them, or {hint}")


def copy_to_disk(store: Disk | Bucket, files: Mapping[Path, StoredFile]) -> None:
    """Copy files to these paths, in parallel pieces; OSError also for one that has changed since it was listed."""
    with closing(copy_each(store, files)) as copies:
        for _, error in copies:
            if error:
                raise error


def copy_each(
    store: Disk | Bucket, files: Mapping[Path, StoredFile], on_bytes: Callable[[int], object] = lambda size: None
) -> Generator[tuple[Path, OSError | None]]:
    """Copy files to these paths, in parallel pieces; `on_bytes` is called with the size of each piece.

    Yields the path of each copy in the order of `files`, and None, or the reason why it is not complete.
    """
    has_ended = threading.Event()

    def copy(target: Path, info: StoredFile, start: int) -> None:
        if has_ended.is_set():
            return
        size = min(PIECE_BYTES, info.size - start)
        content = store.read(info.path, start, size, info.version)
        if len(content) < size:
            raise Changed(info.path)
        with target.open("r+b") as file:
            file.seek(start)
            file.write(content)
        on_bytes(size)

    with ThreadPoolExecutor(FETCH_THREADS) as threads:
        try:
            pieces = {}
            for target, info in files.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(b"")
                pieces[target] = [
                    threads.submit(copy, target, info, start) for start in range(0, info.size, PIECE_BYTES)
                ]
            for target, copies in pieces.items():
                errors = [error for each in copies if (error := each.exception())]
                if other := next((error for error in errors if not isinstance(error, OSError)), None):
                    raise other
                yield target, next((error for error in errors if isinstance(error, OSError)), None)
        finally:
            has_ended.set()
            threads.shutdown(cancel_futures=True)


def upload(folder: Path, address: str) -> None:
    """Copy the files of a folder to a folder or an `s3://bucket/prefix`, several at once."""
    store, path = open_filesystem(address)

    def copy(source: Path) -> None:
        with source.open("rb") as reader, store.writing(f"{path}/{source.relative_to(folder).as_posix()}") as writer:
            shutil.copyfileobj(reader, writer, PIECE_BYTES)

    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
        list(threads.map(copy, [source for source in sorted(folder.rglob("*")) if source.is_file()]))


def check_room(address: str, needed: int, folder: Path, flag: str, hint: str = "give less") -> None:
    """Raise UsageError unless a folder's disk has room for the bytes of an address, and some to spare.

    Unused caches of the node are deleted if necessary.
    """
    node_cache.make_room(needed + SPARE_BYTES)
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    if needed > free:
        raise UsageError(
            f"{flag}: {address} has {needed / 2**30:.1f} GiB, and there is room for {max(free, 0) / 2**30:.1f} GiB in "
            f"{folder}; {hint}, or a larger root volume"
        )
