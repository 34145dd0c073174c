"""Storage of a run's folder, on a disk or in S3: reads and writes by name, and a check for write access."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.bucket import Bucket, Upload
from ray_on_ecs.storage.disk import Disk, Listing, StoredFile
from ray_on_ecs.storage.filesystem import open_filesystem, short_reason

# Of an integer that 64 bits can hold; Python converts longer ones slowly, and most of them not to floats.
MAX_DIGITS = 20


@dataclass(frozen=True)
class RunStorage:
    """Folder of one run. Its methods raise OSError if the storage can't be read or written."""

    store: Disk | Bucket
    base: str  # the storage path on the disk, or `bucket/prefix`
    run_name: str  # and of its folder below `base`; empty for the storage path itself
    uri: str  # the run's folder as a user would type it
    flag: str = field(default="--run-name", compare=False)  # by which the user has named the run

    @classmethod
    def open(cls, storage_path: str, run_name: str, **options: Any) -> RunStorage:
        """Return the run's folder under a folder or an `s3://bucket/prefix`, without creating it.

        The options are those of `Bucket`. UsageError if the path has another scheme, or AWS's configuration is broken.
        """
        try:
            store, base = open_filesystem(storage_path, **options)
        except ValueError as cause:
            raise _unusable(storage_path, cause) from cause
        root = base if isinstance(store, Disk) else storage_path
        return cls(store, base, run_name, f"{root.rstrip('/')}/{run_name}".rstrip("/"))

    @property
    def storage_path(self) -> str:
        """The folder or address with the runs."""
        return self.uri.removesuffix(f"/{self.run_name}")

    def sibling(self, run_name: str) -> RunStorage:
        """Return the folder of another run of this storage path."""
        return RunStorage(self.store, self.base, run_name, f"{self.storage_path}/{run_name}")

    def check_writable(self) -> None:
        """Raise UsageError unless a temporary file can be written."""
        try:
            if self.is_local:
                folder = Path(self.path())
                nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
                with tempfile.TemporaryFile(dir=nearest):  # in which the other folders would be created
                    pass
            else:
                probe = f"{self.base}/.write-check.{uuid4().hex}"  # another run may check at the same time
                with self.store.writing(probe):
                    pass
                self.store.delete(probe)
        except (OSError, ValueError) as cause:
            raise _unusable(self.storage_path, cause) from cause

    def check_shared(self) -> None:
        """Raise UsageError for a folder without the run's document: it is local to this node."""
        if not self.exists(layout.SETTINGS):
            raise UsageError(
                f"--storage-path: {self.uri} is not the same folder on every node; give s3://bucket/prefix, or a "
                "folder that all nodes share"
            )

    def path(self, *names: str) -> str:
        """Return the path of a file in the run's folder, as `store` expects it."""
        return "/".join([self.base, *([self.run_name] if self.run_name else []), *names])

    def find(self, name: str) -> StoredFile | None:
        """Return a file of the run's folder, or None if it is missing."""
        return self.store.find(self.path(name))

    def exists(self, name: str) -> bool:
        """Return True if the run's folder has a file of this name."""
        return self.find(name) is not None

    def listing(self, *folder: str) -> Listing:
        """Return the files and folders of the run's folder, or of a subfolder, without those below."""
        return self.store.listing(self.path(*folder))

    def folders(self, prefix: str) -> list[str]:
        """Return the sorted names of the folders in the run's folder that begin with `prefix`."""
        return [name for name in self.listing().folders if name.startswith(prefix)]

    def file_sizes(self, *folder: str) -> dict[str, int]:
        """Return the size in bytes of each file in the run's folder, or in a subfolder, by name."""
        return {name: info.size for name, info in self.listing(*folder).files.items()}

    def files(self, folder: str) -> dict[str, StoredFile]:
        """Return all files below a subfolder, by their path in it."""
        return self.store.listing(self.path(folder), recursive=True).files

    def read(self, name: str) -> bytes:
        """Read a whole file; FileNotFoundError if it is missing."""
        return self.store.read(self.path(name))

    def open_reader(self, name: str) -> io.BufferedIOBase | io.RawIOBase:
        """Open a file for random access; FileNotFoundError if it is missing."""
        return self.store.open_reader(self.path(name))

    def open_writer(self, name: str) -> AbstractContextManager[IO[bytes] | Upload]:
        """Open a file to write it; readers see the old one until it is complete, also if the block fails."""
        return self.store.writing(self.path(name))

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file atomically."""
        with self.open_writer(name) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, value: Any) -> None:
        """Write an indented JSON document."""
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_lines(self, name: str, values: Sequence[Any]) -> None:
        """Write a JSON document per line."""
        self.write(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def read_json(self, name: str) -> Any:
        """Read a JSON object (see `parse_json`); None if it is missing, UsageError if the file has another content."""
        try:
            document = parse_json(self.read(name))
        except FileNotFoundError:
            return None
        except ValueError as cause:
            raise self._broken(name, one_line(cause)) from cause
        if not isinstance(document, dict):
            raise self._broken(name, "it is not a JSON object")
        return document

    def read_settings(self) -> dict[str, Any]:
        """Read the settings of the run's last command; empty before the first; UsageError if the file is broken."""
        settings = (self.read_json(layout.SETTINGS) or {}).get("settings") or {}
        if not isinstance(settings, dict):
            raise self._broken(layout.SETTINGS, "its settings are not a JSON object")
        return settings

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        self.store.delete(self.path(name))

    def delete_folder(self, name: str = "") -> None:
        """Delete the run's folder, or a subfolder, and its contents if it exists."""
        self.store.delete_folder(self.path(name) if name else self.path())

    @property
    def is_local(self) -> bool:
        """True for a folder on a disk, False in S3."""
        return isinstance(self.store, Disk)

    def _broken(self, name: str, reason: str) -> UsageError:
        return UsageError(
            f"{self.flag}: {name} in {self.uri} is broken ({reason}); delete it or give another {self.flag}"
        )


def parse_json(content: bytes) -> Any:
    """Parse a document; a number that is not finite, or above 64 bits, becomes None. ValueError if it is not JSON."""
    try:
        return DECODER.decode(content.decode())
    except RecursionError as cause:
        raise ValueError("it is nested too deeply") from cause


DECODER = json.JSONDecoder(
    parse_float=lambda text: float(text) if math.isfinite(float(text)) else None,
    parse_int=lambda text: int(text) if len(text) <= MAX_DIGITS else None,
    parse_constant=lambda _: None,
)


def _unusable(path: str, cause: Exception) -> UsageError:
    return UsageError(
        f"--storage-path: {path!r} can't be written ({short_reason(cause)}); "
        "give a folder with write access, or s3://bucket/prefix of a bucket that your credentials can write"
    )
