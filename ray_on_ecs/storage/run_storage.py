"""Storage of a run's folder, on a disk or in S3: reads and writes by name, and a check for write access."""

from __future__ import annotations

import json
import math
import posixpath
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import NativeFile, fs

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.filesystem import open_filesystem, short_reason

T = TypeVar("T")
# Of an integer that 64 bits can hold; Python converts longer ones slowly, and most of them not to floats.
MAX_DIGITS = 20


@dataclass(frozen=True)
class RunStorage:
    """Folder of one run.

    Attributes:
        base: The storage path on the file system, without a scheme.
        run_name: The name of the run, and of its folder below `base`.
        uri: The run's folder as a user would type it.
    """

    filesystem: fs.FileSystem
    base: str
    run_name: str
    uri: str

    @classmethod
    def open(cls, storage_path: str, run_name: str) -> RunStorage:
        """Return the run's folder under `storage_path`, a folder or an `s3://bucket/prefix`, without creating it.

        Raises:
            UsageError: The path has another scheme, or its bucket can't be reached.
        """
        try:
            filesystem, base = open_filesystem(storage_path)
        except (OSError, ValueError) as cause:
            raise _unusable(storage_path, cause) from cause
        uri = base if isinstance(filesystem, fs.LocalFileSystem) else storage_path.rstrip("/")
        return cls(filesystem, base, run_name, f"{uri}/{run_name}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the folder again in the other process: pyarrow pickles a file system without its retry strategy."""
        return RunStorage.open, (self.uri.removesuffix(f"/{self.run_name}"), self.run_name)

    def check_writable(self) -> None:
        """Check the write access with a temporary file; in S3 an empty marker of the prefix may remain.

        Raises:
            UsageError: The folder or bucket is missing, or may not be written.
        """
        try:
            if self.is_local:
                _check_folder(Path(self.path()))
            else:
                self._check_bucket()
        except (OSError, ValueError) as cause:
            raise _unusable(self.uri.removesuffix(f"/{self.run_name}"), cause) from cause

    def check_shared(self) -> None:
        """Refuse a folder without the settings that the driver has written: it is local to this node.

        Raises:
            UsageError: The settings are not there.
        """
        if not self.exists(layout.SETTINGS):
            raise UsageError(
                f"--storage-path: {self.uri} is not the same folder on every node; give s3://bucket/prefix, or a "
                "folder that all nodes share"
            )

    def path(self, *names: str) -> str:
        """Return a path in the run's folder, as the file system expects it."""
        return "/".join([self.base, self.run_name, *names])

    def exists(self, name: str) -> bool:
        """Return True if the run's folder has a file of this name."""
        return self.filesystem.get_file_info(self.path(name)).type == fs.FileType.File

    def folders(self, prefix: str) -> list[str]:
        """Return the sorted names of the folders in the run's folder that begin with `prefix`."""
        infos = self.filesystem.get_file_info(fs.FileSelector(self.path(), allow_not_found=True))
        names = [info.base_name for info in infos if info.type == fs.FileType.Directory]
        return sorted(name for name in names if name.startswith(prefix))

    def file_sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each file in the run's folder, or in a subfolder, by name."""
        path = self.path(folder) if folder else self.path()
        infos = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return {info.base_name: info.size for info in infos if info.type == fs.FileType.File}

    def files(self, folder: str) -> dict[str, fs.FileInfo]:
        """Return all files below a subfolder, by their path in it."""
        infos = self.filesystem.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True, recursive=True))
        prefix = f"{self.path(folder)}/"
        return {info.path.removeprefix(prefix): info for info in infos if info.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        """Read a whole file; FileNotFoundError if it is missing."""
        with self.open_reader(name) as stream:
            return stream.read()

    def read_parsed(self, name: str, parse: Callable[[bytes], T]) -> T:
        """Read a whole file and parse it.

        pyarrow requests an S3 object's size before its content. An object that is replaced in between is truncated, or
        ends with random bytes, and is read again.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: It can't be parsed.
        """
        content = None
        while True:
            previous, content = content, self.read(name)
            try:
                return parse(content)
            except ValueError:
                if content == previous:
                    raise

    def open_reader(self, name: str) -> NativeFile:
        """Open a file for random access; FileNotFoundError if it is missing."""
        return self.filesystem.open_input_file(self.path(name))

    def open_writer(self, name: str) -> NativeFile:
        """Open a file to write it from its start, and create its folder. In S3 it appears when it is closed."""
        if self.is_local:  # S3 has no folders
            self.filesystem.create_dir(self.path(*name.split("/")[:-1]), recursive=True)
        # pyarrow would compress a file whose name ends with .gz.
        return self.filesystem.open_output_stream(self.path(name), compression=None)

    @contextmanager
    def replace(self, name: str) -> Generator[NativeFile]:
        """Open a file to write it; readers see the old one until it is complete."""
        # A random name: a user's files may be a.pt and a.pt.part, and a name may be as long as the disk allows.
        temporary = posixpath.join(posixpath.dirname(name), f".{uuid.uuid4().hex}.part") if self.is_local else name
        with self.open_writer(temporary) as stream:
            yield stream
        if self.is_local:
            self.filesystem.move(self.path(temporary), self.path(name))

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file atomically."""
        with self.replace(name) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, value: Any) -> None:
        """Write an indented JSON document."""
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_lines(self, name: str, values: Sequence[Any]) -> None:
        """Write a JSON document per line."""
        self.write(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def read_json(self, name: str) -> Any:
        """Read a JSON object, which is a dict; None if it is missing. See `parse_json` for its numbers.

        Raises:
            UsageError: The file is not a JSON object.
        """
        try:
            document = self.read_parsed(name, parse_json)
        except FileNotFoundError:
            return None
        except ValueError as cause:
            raise self._broken(name, one_line(cause)) from cause
        if not isinstance(document, dict):
            raise self._broken(name, "it is not a JSON object")
        return document

    def read_settings(self) -> dict[str, Any]:
        """Read the settings of the run's last command; empty before the first.

        Raises:
            UsageError: The file is broken.
        """
        settings = (self.read_json(layout.SETTINGS) or {}).get("settings") or {}
        if not isinstance(settings, dict):
            raise self._broken(layout.SETTINGS, "its settings are not a JSON object")
        return settings

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self.path(name))

    def delete_folder(self, name: str) -> None:
        """Delete a folder and its contents if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.path(name))

    @property
    def is_local(self) -> bool:
        """True for a folder on a disk, False in S3."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def _broken(self, name: str, reason: str) -> UsageError:
        return UsageError(
            f"--run-name: {name} in {self.uri} is broken ({reason}); delete it or give another --run-name"
        )

    def _check_bucket(self) -> None:
        probe = f"{self.base}/.write-check.{uuid.uuid4().hex}"  # another run may check at the same time
        with self.filesystem.open_output_stream(probe) as stream:
            stream.write(b"")
        with suppress(FileNotFoundError):  # the first request has deleted it, and its answer was lost
            self.filesystem.delete_file(probe)


def parse_json(content: bytes) -> Any:
    """Parse a document of the storage; a number that is not finite, or above 64 bits, becomes None.

    Raises:
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return DECODER.decode(content.decode())
    except RecursionError as cause:
        raise ValueError("it is nested too deeply") from cause


def _finite(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


DECODER = json.JSONDecoder(
    parse_float=_finite,
    parse_int=lambda text: int(text) if len(text) <= MAX_DIGITS else None,
    parse_constant=lambda _: None,
)


def _check_folder(folder: Path) -> None:
    """Check the nearest existing folder, in which the others would be created."""
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=nearest):
        pass


def _unusable(path: str, cause: Exception) -> UsageError:
    return UsageError(
        f"--storage-path: {path!r} can't be written ({short_reason(cause)}); "
        "give a folder with write access, or s3://bucket/prefix of a bucket that your credentials can write"
    )
