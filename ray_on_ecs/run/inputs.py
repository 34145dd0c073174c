"""The inputs of a script, from a disk, a bucket or another run: on each node before the script starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage import filesystem
from ray_on_ecs.storage.disk import Disk
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot

OTHER_RUN = "run:"
STREAM = "stream:"


def resolve(name: str, source: str, storage: RunStorage) -> str:
    """Return the folder or `s3://` address that an input names, `stream:` kept before it; check that it has files.

    Args:
        name: The input's name.
        source: The value of --input.
        storage: The run's folder; `run:OTHER` is next to it.

    Raises:
        UsageError: It can't be read, or is empty, or has a name that a disk can't have.
    """
    prefix = STREAM if source.startswith(STREAM) else ""
    address = absolute(source).removeprefix(STREAM)
    if address.startswith(OTHER_RUN):
        address = _files_of(address.removeprefix(OTHER_RUN), f"{name}={source}", storage)
    try:
        store, path = filesystem.open_filesystem(address)
        if isinstance(store, Disk):
            if not store.has_files(path):
                raise FileNotFoundError("not found, or empty")
            return prefix + address
        files = filesystem.files_by_name(store, path)
        if not files:
            raise FileNotFoundError("not found, or empty")
    except (OSError, ValueError) as cause:
        raise UsageError(
            f"--input: {name}={source} can't be read ({short_reason(cause)}); give a folder, s3://bucket/prefix or "
            "run:NAME of a run with files"
        ) from cause
    if not prefix:
        filesystem.check_names(f"{name}={source}", files, "--input", _hint(address))
    return prefix + address


def is_of_this_machine(source: str) -> bool:
    """Return whether an input is a folder or a file."""
    return "://" not in source and not source.removeprefix(STREAM).startswith(OTHER_RUN)


def absolute(source: str) -> str:
    """Return an input whose path, if it is one, does not depend on the current folder."""
    if not is_of_this_machine(source):
        return source
    prefix = STREAM if source.startswith(STREAM) else ""
    return prefix + str(Path(source.removeprefix(STREAM)).expanduser().absolute())


def _files_of(run_name: str, shown: str, storage: RunStorage) -> str:
    """Return the folder with the files of another run, which must have finished."""
    other = replace(storage.sibling(run_name), flag="--input")
    snapshot = read_snapshot(other)
    if any(not key.startswith(f"{snapshot.folder}/") for key in snapshot.keys):
        raise UsageError(f"--input: {shown} has not finished, so that its files still change; wait for its end")
    return f"{other.uri}/{snapshot.folder}"


def fetch(address: str) -> str:
    """Return the path of an input on this node; from a bucket it is fetched, once for all workers and runs of the node.

    With `stream:` before it the address itself is returned: the script reads it, part by part.

    Args:
        address: As `resolve` returned it.

    Raises:
        UsageError: The disk lacks room for it, or does not allow its names.
        OSError: It can't be read.
    """
    if address.startswith(STREAM):
        return address.removeprefix(STREAM)
    try:
        if "://" not in address:
            os.stat(address)  # a mount that has lost its process is an OSError, which is not the user's mistake
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise UsageError(
            f"--input: {address} is not on every node; give s3://bucket/prefix, or a folder that all nodes share "
            "(instances that are older than a mount of the stack lack it until they scale in)"
        ) from cause
    return str(filesystem.fetch(address, "--input", _hint(address)))


def _hint(address: str) -> str:
    return f"give stream:{address} and read it from there, part by part"
