"""Files in a folder or a bucket: opened in place, or fetched to a node's disk.

pyarrow retries lost calls to S3, part by part, but not calls that can't succeed, such as to a missing bucket.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from ray_on_ecs.addresses import check_address
from ray_on_ecs.errors import UsageError, counted
from ray_on_ecs.names import fault_of, folders_of
from ray_on_ecs.storage import node_cache

# With a backoff up to 20 s, enough for a minute without S3.
MAX_ATTEMPTS = 12
# Disk space that a fetch leaves free.
SPARE_BYTES = 2 * 2**30
# Bytes of a ranged GET, and parallel requests: a single one uses a small part of a node's bandwidth.
PIECE_BYTES = 16 * 2**20
FETCH_THREADS = 16
SHOWN_NAMES = 3


def open_filesystem(address: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a folder or an `s3://bucket/prefix`, and the path on it.

    Raises:
        UsageError: It may have a key in it, which errors would show.
        ValueError: The address has another scheme.
        OSError: The bucket can't be reached.
    """
    check_address("storage", address)
    if "://" not in address:
        return fs.LocalFileSystem(), str(Path(address).expanduser().absolute())
    if not re.fullmatch(r"s3://[^/@?]+(/[^?]*)?", address):  # pyarrow takes KEY:SECRET@, which would be shown
        raise ValueError("it is neither a folder nor a bucket")
    path = address.removeprefix("s3://").rstrip("/")
    bucket, _, _ = path.partition("/")
    default, _ = fs.FileSystem.from_uri(f"s3://{bucket}")  # resolves the region, but doesn't take a retry strategy
    filesystem = fs.S3FileSystem(
        region=default.region or None,
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        allow_delayed_open=True,  # a small file is one PUT, which can be retried, instead of a multipart upload
    )
    return filesystem, path


def short_reason(cause: BaseException) -> str:
    """Return the first line of an error, without pyarrow's and AWS's decoration."""
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    return first.rpartition("AWS Error ")[2].partition(" (Request ID")[0]


def fetch(address: str, flag: str, hint: str = "give less") -> Path:
    """Return the local path of a folder or an `s3://` address.

    Objects are fetched to the node's disk, once for all its workers and runs.

    Args:
        address: A folder, a prefix, whose objects become a folder, or one object, which becomes a file.
        flag: The flag with the address, for errors.
        hint: The way out if the disk is too small, besides a larger one.

    Raises:
        UsageError: The address is empty or may have a key in it, or the disk is too small for it.
        OSError: It can't be read.
    """
    check_address(flag, address)
    if "://" not in address:
        return Path(address)
    filesystem, path = open_filesystem(address)
    files = files_by_name(filesystem, path)
    if not files:
        raise UsageError(f"{flag}: there is nothing at {address}")
    check_names(address, files, flag, hint)

    def make(folder: Path) -> None:
        size = sum(info.size for info in files.values())
        check_room(address, size, folder.parent, flag, hint)
        print(f"fetching {address} to this node: {counted(len(files), 'file')}, {size / 2**20:,.0f} MiB", flush=True)
        folder.mkdir()
        try:
            copy_to_disk(filesystem, {folder / name: info for name, info in files.items()})
        except FileNotFoundError as cause:
            if files_by_name(filesystem, path).keys() < files.keys():  # deleted since it was listed
                raise
            raise UsageError(
                f"{flag}: {address} has a key that can't be a file, such as one that ends with / and is not empty "
                f"({short_reason(cause)}); rename it, or {hint}"
            ) from cause

    version = repr([address, *((info.path, info.size, info.mtime_ns) for info in files.values())])
    folder = node_cache.cached("inputs", version, make)
    if len(files) == 1:
        [(name, info)] = files.items()
        if info.path == path:  # the address is an object
            return folder / name
    return folder


def files_by_name(filesystem: fs.FileSystem, path: str) -> dict[str, fs.FileInfo]:
    """Return the files below a path by their names relative to it, or the file at the path."""
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.File:
        return {info.base_name: info}
    return {file.path.removeprefix(f"{path}/"): file for file in list_files(filesystem, path)}


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


def copy_to_disk(filesystem: fs.FileSystem, files: Mapping[Path, fs.FileInfo]) -> None:
    """Copy files to these paths, in parallel pieces.

    Raises:
        OSError: A file can't be read, is shorter than when it was listed, or the disk is full. Other changes since
            then are not noticed.
    """

    def copy(piece: tuple[Path, int]) -> None:
        target, offset = piece
        info = files[target]
        size = min(PIECE_BYTES, info.size - offset)
        with filesystem.open_input_file(info.path) as source:
            content = source.read_at(size, offset)
        if len(content) < size:
            raise OSError(f"{info.path} has become shorter while it was read")
        with target.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    pieces: list[tuple[Path, int]] = []
    for target, info in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")
        pieces += [(target, offset) for offset in range(0, info.size, PIECE_BYTES)]
    with ThreadPoolExecutor(FETCH_THREADS) as threads:
        list(threads.map(copy, pieces))


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


def list_files(filesystem: fs.FileSystem, path: str) -> list[fs.FileInfo]:
    """List the files below a path, at any depth, by their names."""
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return sorted((info for info in infos if info.type == fs.FileType.File), key=lambda info: info.path)
