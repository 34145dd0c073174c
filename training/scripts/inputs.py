"""The inputs of a script, from a disk, a bucket or another run: on each node before the script starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from filelock import FileLock
from pyarrow import fs

from training.errors import UsageError
from training.node_folder import node_folder
from training.run import layout
from training.run.storage import RunStorage, open_filesystem, short_reason

VARIABLE_PREFIX = "INPUT_"
OTHER_RUN = "run:"
STREAM = "stream:"
# Of the disk, beside the inputs.
SPARE_BYTES = 2 * 2**30


def resolve(name: str, source: str, storage: RunStorage) -> str:
    """Return the folder or `s3://` address that an input names, `stream:` kept before it; check that it has files.

    Args:
        name: The input's name.
        source: What the user gave for it.
        storage: The run's folder; `run:OTHER` is next to it.

    Raises:
        UsageError: It can't be read, or is empty.
    """
    prefix = STREAM if source.startswith(STREAM) else ""
    address = source.removeprefix(STREAM)
    if address.startswith(OTHER_RUN):
        address = f"{storage.uri.removesuffix(storage.run_name)}{address.removeprefix(OTHER_RUN)}/{layout.FILES_FOLDER}"
    elif "://" not in address:
        address = str(Path(address).expanduser().absolute())
    try:
        filesystem, path = open_filesystem(address)
        found = filesystem.get_file_info(path)
        if found.type != fs.FileType.File and not _files(filesystem, path):
            raise FileNotFoundError("there is nothing")
    except (OSError, ValueError) as cause:
        raise UsageError(
            f"--input: {name}={source} can't be read ({short_reason(cause)}); give a folder, s3://bucket/prefix or "
            "run:NAME of a run with files"
        ) from cause
    return prefix + address


def fetch(address: str) -> str:
    """Return the path of an input on this node; from a bucket it is fetched, once for all workers and runs of the node.

    With `stream:` before it the address itself is returned: the script reads it, part by part.

    Args:
        address: As `resolve` returned it.

    Raises:
        UsageError: The disk has no room for it.
        OSError: It can't be read.
    """
    if address.startswith(STREAM):
        return address.removeprefix(STREAM)
    if "://" not in address:
        if not os.path.exists(address):
            raise UsageError(
                f"--input: {address} is not on every node; give s3://bucket/prefix, or a folder that all nodes share"
            )
        return address
    filesystem, path = open_filesystem(address)
    files = _files(filesystem, path) or [filesystem.get_file_info(path)]
    if files[0].type == fs.FileType.NotFound:
        raise UsageError(f"--input: there is nothing at {address} any more")
    version = repr([address, *((each.path, each.size, each.mtime_ns) for each in files)])
    target = node_folder("inputs", version)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            size = sum(each.size for each in files)
            _check_room(address, size, target.parent)
            print(f"fetching {address} to this node: {len(files)} files, {size / 2**20:,.0f} MiB", flush=True)
            _fetch(filesystem, path, files, target)
    return str(target if len(files) > 1 or files[0].path != path else target / files[0].base_name)


def _fetch(filesystem: fs.FileSystem, path: str, files: list[fs.FileInfo], target: Path) -> None:
    part = Path(f"{target}.part")
    shutil.rmtree(part, ignore_errors=True)
    for each in files:
        local = part / (each.path.removeprefix(f"{path}/") if each.path != path else each.base_name)
        local.parent.mkdir(parents=True, exist_ok=True)
        fs.copy_files(each.path, str(local), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
    part.rename(target)


def _check_room(address: str, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    if needed > free:
        raise UsageError(
            f"--input: {address} has {needed / 2**30:.1f} GiB, and there is room for {max(free, 0) / 2**30:.1f} GiB in "
            f"{folder}; give stream:{address} and read it from there, part by part, or a larger root volume"
        )


def _files(filesystem: fs.FileSystem, path: str) -> list[fs.FileInfo]:
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return sorted((each for each in found if each.type == fs.FileType.File), key=lambda each: each.path)
