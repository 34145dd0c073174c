"""The folder of a run, on a disk or in S3: reads and writes by name, and a check that it can be written at all."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import NativeFile, fs

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import open_filesystem, short_reason
from ray_on_ecs.tracking import layout

T = TypeVar("T")


@dataclass(frozen=True)
class RunStorage:
    """One run's folder.

    Attributes:
        filesystem: The file system, as pyarrow has it.
        base: The storage path on that file system, without a scheme.
        run_name: The run's folder below it.
        uri: The run's folder as a user would type it.
    """

    filesystem: fs.FileSystem
    base: str
    run_name: str
    uri: str

    @classmethod
    def open(cls, storage_path: str, run_name: str) -> RunStorage:
        """Find the run's folder under `storage_path`, a folder or an `s3://bucket/prefix`; nothing is created.

        Raises:
            UsageError: The path is not of a known kind, or its bucket can't be reached.
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
        """Try to write where the run will write; this leaves nothing but, in S3, the empty marker of the prefix.

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
        """Refuse a folder that isn't the driver's, who has written the settings there: all results would be lost.

        Raises:
            UsageError: It is another one.
        """
        if not self.exists(layout.SETTINGS):
            raise UsageError(
                f"--storage-path: {self.uri} is not the same folder on every node; give s3://bucket/prefix, or a "
                "folder that all nodes share"
            )

    def path(self, *names: str) -> str:
        """Return a path in the run's folder, as the file system takes it."""
        return "/".join([self.base, self.run_name, *names])

    def exists(self, name: str) -> bool:
        """Return whether the run's folder holds a file of this name."""
        return self.filesystem.get_file_info(self.path(name)).type == fs.FileType.File

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders in the run's folder that begin with `prefix`, in order."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.path(), allow_not_found=True))
        return sorted(
            each.base_name for each in found if each.type == fs.FileType.Directory and each.base_name.startswith(prefix)
        )

    def file_sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each file in the run's folder, or in one of its folders, by name."""
        path = self.path(folder) if folder else self.path()
        found = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return {each.base_name: each.size for each in found if each.type == fs.FileType.File}

    def files(self, folder: str) -> dict[str, fs.FileInfo]:
        """Return all files below a folder of the run's folder, by their path in it."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True, recursive=True))
        prefix = f"{self.path(folder)}/"
        return {each.path.removeprefix(prefix): each for each in found if each.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        """Read a whole file; FileNotFoundError where there is none."""
        with self.open_reader(name) as stream:
            return stream.read()

    def read_parsed(self, name: str, parse: Callable[[bytes], T]) -> T:
        """Read a whole file and parse it.

        pyarrow asks S3 for an object's size before it reads it. An object that is replaced in between is cut off, or
        has random bytes at its end, and is read again.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It can't be parsed.
        """
        content = None
        while True:
            before, content = content, self.read(name)
            try:
                return parse(content)
            except ValueError:
                if content == before:
                    raise

    def open_reader(self, name: str) -> NativeFile:
        """Open a file to read any part of it; FileNotFoundError where there is none."""
        return self.filesystem.open_input_file(self.path(name))

    def open_writer(self, name: str) -> NativeFile:
        """Open a file to write it from its start, making its folder if need be. S3 shows it once it is closed."""
        if self.is_local:  # S3 has no folders
            self.filesystem.create_dir(self.path(*name.split("/")[:-1]), recursive=True)
        return self.filesystem.open_output_stream(self.path(name), compression=None)  # a name in .gz is a name

    @contextmanager
    def replace(self, name: str) -> Generator[NativeFile]:
        """Open a file to write it; until it is complete, readers find the old one."""
        # A user's files may be a.pt and a.pt.part.
        written = f"{name}.{uuid.uuid4().hex[:8]}.part" if self.is_local else name
        with self.open_writer(written) as stream:
            yield stream
        if self.is_local:
            self.filesystem.move(self.path(written), self.path(name))

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file; readers find the old one or the new one."""
        with self.replace(name) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document that people can read."""
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_lines(self, name: str, values: Sequence[Any]) -> None:
        """Write one JSON document per line."""
        self.write(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def read_json(self, name: str) -> Any:
        """Read the JSON document of that name, or None where there is none.

        Raises:
            UsageError: The file is no JSON.
        """
        try:
            return self.read_parsed(name, json.loads)
        except FileNotFoundError:
            return None
        except ValueError as cause:
            raise UsageError(
                f"--run-name: {name} in {self.uri} is broken ({cause}); delete it or give another --run-name"
            ) from cause

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self.path(name))

    def delete_folder(self, name: str) -> None:
        """Delete a folder with everything in it, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.path(name))

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk, not in S3."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def _check_bucket(self) -> None:
        probe = f"{self.base}/.write-check"
        with self.filesystem.open_output_stream(probe) as stream:
            stream.write(b"")
        self.filesystem.delete_file(probe)


def _check_folder(folder: Path) -> None:
    """Try the nearest folder that exists; the others would be made in it."""
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=nearest):
        pass


def _unusable(path: str, cause: Exception) -> UsageError:
    return UsageError(
        f"--storage-path: {path!r} can't be written ({short_reason(cause)}); "
        "give a folder that you may write, or s3://bucket/prefix of a bucket that exists and your credentials reach"
    )
