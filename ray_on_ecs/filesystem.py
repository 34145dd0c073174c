"""Files in a folder or a bucket, by one address: opened where they are, or fetched to a node's disk.

pyarrow repeats the calls that S3 loses, part by part, and none that can't succeed, as to a bucket that isn't there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from ray_on_ecs import node_cache
from ray_on_ecs.errors import UsageError, counted

# The pauses between attempts double up to 20 s: all of them together outlast a minute without S3.
MAX_ATTEMPTS = 12
# Of the disk, beside what is fetched.
SPARE_BYTES = 2 * 2**30
# Bytes of a call, and the number of calls at a time: one call has a small part of a node's bandwidth.
PIECE_BYTES = 16 * 2**20
FETCH_THREADS = 16
# Of a file's or folder's name on Linux, in bytes; a key in S3 may have 1,024.
LONGEST_NAME = 255
SHOWN_NAMES = 3


def open_filesystem(address: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a folder or an `s3://bucket/prefix`, and the path on it.

    Raises:
        ValueError: The address is of another kind.
        OSError: The bucket can't be reached.
    """
    if "://" not in address:
        return fs.LocalFileSystem(), str(Path(address).expanduser().absolute())
    if not re.fullmatch(r"s3://[^/@?]+(/[^?]*)?", address):  # what stands before an @ would be a secret
        raise ValueError("it is neither a folder nor a bucket")
    path = address.removeprefix("s3://").rstrip("/")
    bucket, _, _ = path.partition("/")
    found, _ = fs.FileSystem.from_uri(f"s3://{bucket}")  # knows the bucket's region; can't be given a retry strategy
    filesystem = fs.S3FileSystem(
        region=found.region or None,
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        allow_delayed_open=True,  # a small file is one call, which may be repeated, instead of an upload in three
    )
    return filesystem, path


def short_reason(cause: BaseException) -> str:
    """Say in a few words why a call failed."""
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    return first.rpartition("AWS Error ")[2].partition(" (Request ID")[0]


def fetch(address: str, flag: str, hint: str = "give less") -> Path:
    """Return the path of a folder or an `s3://` address on this node.

    What is in a bucket is fetched to the node's disk, once for all its workers and runs.

    Args:
        address: A folder, a prefix, whose objects become a folder, or one object, which becomes a file.
        flag: The flag that names it, for errors.
        hint: What to do where it has no room, beside getting a larger disk.

    Raises:
        UsageError: There is nothing, or the disk has no room for it.
        OSError: It can't be read.
    """
    if "://" not in address:
        return Path(address)
    filesystem, path = open_filesystem(address)
    files = files_by_name(filesystem, path)
    if not files:
        raise UsageError(f"{flag}: there is nothing at {address}")
    check_names(address, files, flag, hint)

    def make(folder: Path) -> None:
        size = sum(each.size for each in files.values())
        check_room(address, size, folder.parent, flag, hint)
        print(f"fetching {address} to this node: {counted(len(files), 'file')}, {size / 2**20:,.0f} MiB", flush=True)
        folder.mkdir()
        try:
            copy_to_disk(filesystem, {folder / name: each for name, each in files.items()})
        except FileNotFoundError as cause:
            if files_by_name(filesystem, path).keys() < files.keys():  # it has been deleted meanwhile
                raise
            raise UsageError(
                f"{flag}: {address} has a key that can't be a file, such as one that ends with / and is not empty "
                f"({short_reason(cause)}); rename it, or {hint}"
            ) from cause

    version = repr([address, *((each.path, each.size, each.mtime_ns) for each in files.values())])
    folder = node_cache.cached("inputs", version, make)
    [*others, (name, found)] = files.items()
    return folder if others or found.path != path else folder / name


def files_by_name(filesystem: fs.FileSystem, path: str) -> dict[str, fs.FileInfo]:
    """Return the files below a path by their names there, or the one file that the path is."""
    found = filesystem.get_file_info(path)
    if found.type == fs.FileType.File:
        return {found.base_name: found}
    return {each.path.removeprefix(f"{path}/"): each for each in list_files(filesystem, path)}


def check_names(address: str, names: Collection[str], flag: str, hint: str) -> None:
    """Raise UsageError unless files of these names can lie in a folder of a disk: a key in S3 may be any text."""
    folders = {name[:end] for name in names for end in (found.start() for found in re.finditer("/", name))}
    faults = {name: fault for name in names if (fault := _fault(name, name in folders))}
    if faults:
        shown = ", ".join(f"{name!r} {fault}" for name, fault in list(faults.items())[:SHOWN_NAMES])
        others = f", and {len(faults) - SHOWN_NAMES} more" if len(faults) > SHOWN_NAMES else ""
        raise UsageError(f"{flag}: {address} has keys that can't be files: {shown}{others}; rename them, or {hint}")


def _fault(name: str, is_folder: bool) -> str | None:
    parts = name.split("/")
    if is_folder:
        return "is a folder, too"
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
        return "has an empty part, '.' or '..'"
    if max(len(os.fsencode(part)) for part in parts) > LONGEST_NAME:
        return f"has a part of more than {LONGEST_NAME} bytes"
    return None


def copy_to_disk(filesystem: fs.FileSystem, files: Mapping[Path, fs.FileInfo]) -> None:
    """Copy files to these paths: several at a time, and of a large one several pieces at a time.

    Raises:
        OSError: A file can't be read, or is shorter than when it was listed, or the disk is full. Another change
            since then goes unnoticed.
    """

    def copy(target: Path, offset: int) -> None:
        found = files[target]
        size = min(PIECE_BYTES, found.size - offset)
        with filesystem.open_input_file(found.path) as source:
            content = source.read_at(size, offset)
        if len(content) < size:
            raise OSError(f"{found.path} has become shorter while it was read")
        with target.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    for target in files:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")
    pieces = [(target, offset) for target, found in files.items() for offset in range(0, found.size, PIECE_BYTES)]
    with ThreadPoolExecutor(FETCH_THREADS) as threads:
        list(threads.map(lambda piece: copy(*piece), pieces))


def check_room(address: str, needed: int, folder: Path, flag: str, hint: str = "give less") -> None:
    """Raise UsageError unless a folder's disk has room for so many bytes of an address, and some to spare.

    What no process of the node uses is deleted for it.
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
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return sorted((each for each in found if each.type == fs.FileType.File), key=lambda each: each.path)
