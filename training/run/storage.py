"""The folder of a run, on a disk or in S3: what is written there by name, and whether it can be written at all.

A call that S3 loses is made again, a few times. What can't succeed, as in a bucket that isn't there, is not.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs

from training.errors import UsageError

# Each try is pyarrow's own, which makes three calls within one to ten seconds.
TRIES, FIRST_PAUSE_SECONDS = 4, 1.0
FINAL = ("NO_SUCH_BUCKET", "ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "EXPIRED_TOKEN")
CHUNK_BYTES = 64 * 2**20

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
    def open(cls, storage_path: str, run_name: str) -> "RunStorage":
        """The run's folder under `storage_path`, a folder or an `s3://bucket/prefix`; nothing is created.

        Raises:
            UsageError: The path is not of a known kind, or its bucket can't be reached.
        """
        if "://" not in storage_path:
            base = str(Path(storage_path).expanduser().absolute())
            return cls(fs.LocalFileSystem(), base, run_name, f"{base}/{run_name}")
        if not re.match(r"s3://[^/@]+(/|$)", storage_path):  # what stands before an @ would be a secret
            raise _unusable(storage_path, ValueError("it is neither a folder nor a bucket"))
        try:
            filesystem, base = fs.FileSystem.from_uri(storage_path.rstrip("/"))
        except (OSError, ValueError) as cause:
            raise _unusable(storage_path, cause) from cause
        return cls(filesystem, base, run_name, f"{storage_path.rstrip('/')}/{run_name}")

    def check_writable(self) -> None:
        """Write where the run will write, and leave nothing but, in S3, the prefix's empty marker.

        Raises:
            UsageError: The folder or bucket is missing, or may not be written.
        """
        try:
            if self._is_local:
                _check_folder(Path(self.path()))
            else:
                self._retried(self._check_bucket)
        except (OSError, ValueError) as cause:
            raise _unusable(self.uri.removesuffix(f"/{self.run_name}"), cause) from cause

    def path(self, *names: str) -> str:
        """A path in the run's folder, as the file system takes it."""
        return "/".join([self.base, self.run_name, *names])

    def exists(self, name: str) -> bool:
        """Whether the run's folder holds a file of this name."""
        info = self._retried(lambda: self.filesystem.get_file_info(self.path(name)))
        return info.type == fs.FileType.File

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders in the run's folder that begin with `prefix`, in order."""
        selector = fs.FileSelector(self.path(), allow_not_found=True)
        found = self._retried(lambda: self.filesystem.get_file_info(selector))
        return sorted(
            each.base_name for each in found if each.type == fs.FileType.Directory and each.base_name.startswith(prefix)
        )

    def read(self, name: str) -> bytes:
        """A whole file; FileNotFoundError where there is none."""

        def all_of_it() -> bytes:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return stream.read()

        return self._retried(all_of_it)

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file, making its folder if need be; who reads it finds the old or the new one."""
        data = content.encode() if isinstance(content, str) else content
        path = self.path(name)
        written = f"{path}.part" if self._is_local else path  # S3 shows an object when it is complete

        def all_of_it() -> None:
            with self.filesystem.open_output_stream(written) as stream:
                stream.write(data)

        self._make_folder(*name.split("/")[:-1])
        self._retried(all_of_it)
        if self._is_local:
            self.filesystem.move(written, path)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document that people can read."""
        self.write(name, json.dumps(value, indent=2) + "\n")

    def write_lines(self, name: str, values: Sequence[Any]) -> None:
        """Write one JSON document a line."""
        self.write(name, "".join(json.dumps(value) + "\n" for value in values))

    def read_json(self, name: str) -> Any:
        """The JSON document of that name, or None where there is none.

        Raises:
            UsageError: The file is no JSON.
        """
        try:
            return json.loads(self.read(name))
        except FileNotFoundError:
            return None
        except ValueError as cause:
            raise UsageError(
                f"--run-name: {name} in {self.uri} is broken ({cause}); delete it or give another --run-name"
            ) from cause

    def upload(self, file: Path, name: str) -> None:
        """Copy a file of this machine into the run's folder."""
        self._make_folder(*name.split("/")[:-1])
        # Without threads: https://github.com/apache/arrow/issues/32372
        copy = {"destination_filesystem": self.filesystem, "chunk_size": CHUNK_BYTES, "use_threads": False}

        def whole() -> None:
            fs.copy_files(str(file), self.path(name), **copy)
            self._check_size(name, file.stat().st_size)

        self._retried(whole)

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the run's folder to this machine; FileNotFoundError where there is none."""
        copy = {"source_filesystem": self.filesystem, "chunk_size": CHUNK_BYTES}
        self._retried(lambda: fs.copy_files(self.path(name), str(file), **copy))

    def copy(self, name: str, to: str) -> None:
        """Copy a file within the run's folder."""
        self._make_folder(*to.split("/")[:-1])
        paths, both = (self.path(name), self.path(to)), (self.filesystem, self.filesystem)

        def whole() -> None:
            fs.copy_files(*paths, *both, chunk_size=CHUNK_BYTES, use_threads=False)
            self._check_size(to, self.filesystem.get_file_info(self.path(name)).size)

        self._retried(whole)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        try:
            self._retried(lambda: self.filesystem.delete_file(self.path(name)))
        except FileNotFoundError:
            return

    def delete_folder(self, name: str) -> None:
        """Delete a folder with what it holds, if it is there."""
        try:
            self._retried(lambda: self.filesystem.delete_dir(self.path(name)))
        except FileNotFoundError:
            return

    def _check_size(self, name: str, expected: int) -> None:
        """See that a file is as long as it was; an S3 other than AWS's may keep the marks between its chunks."""
        if (found := self.filesystem.get_file_info(self.path(name)).size) != expected:
            raise OSError(f"{self.uri}/{name} has {found:,} of {expected:,} bytes")

    @property
    def _is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def _retried(self, call: Callable[[], T]) -> T:
        """What the call gives, if need be after some pauses; its last OSError where it never does."""
        for pause in (FIRST_PAUSE_SECONDS * 2**n for n in range(TRIES - 1)):
            try:
                return call()
            except OSError as cause:
                if self._is_local or isinstance(cause, FileNotFoundError) or any(kind in str(cause) for kind in FINAL):
                    raise
                time.sleep(pause)
        return call()

    def _make_folder(self, *names: str) -> None:
        if self._is_local:  # S3 has no folders
            self.filesystem.create_dir(self.path(*names), recursive=True)

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


def short_reason(cause: BaseException) -> str:
    """Why a call failed, in a few words."""
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    return first.rpartition("AWS Error ")[2].partition(" (Request ID")[0]


def _unusable(path: str, cause: Exception) -> UsageError:
    return UsageError(
        f"--storage-path: {path!r} can't be written ({short_reason(cause)}); "
        "give a folder that you may write, or s3://bucket/prefix of a bucket that exists and your credentials reach"
    )
