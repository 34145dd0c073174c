"""The folder of a run, on a disk or in S3: what is written there by name, and whether it can be written at all.

Ray Train keeps its checkpoints in the same folder through the same file system.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

from training.errors import UsageError

WEIGHTS, RESULT, METRICS, CURVES, BEST = "model.pt", "result.json", "metrics.jsonl", "curves.png", "best"
SETTINGS = "config.json"
PLAIN = "without_ray"  # among the settings: a run of training.plain


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
        if not re.match(r"s3://[^/]", storage_path):
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
            if isinstance(self.filesystem, fs.LocalFileSystem):
                _check_folder(Path(self.path()))
            else:
                self._check_bucket()
        except (OSError, ValueError) as cause:
            raise _unusable(self.uri.removesuffix(f"/{self.run_name}"), cause) from cause

    def path(self, *names: str) -> str:
        """A path in the run's folder, as the file system takes it."""
        return "/".join([self.base, self.run_name, *names])

    def exists(self, name: str) -> bool:
        """Whether the run's folder holds a file of this name."""
        return self.filesystem.get_file_info(self.path(name)).type == fs.FileType.File

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file, making its folder if need be."""
        self._make_folder(*name.split("/")[:-1])
        with self.filesystem.open_output_stream(self.path(name)) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document that people can read."""
        self.write(name, json.dumps(value, indent=2) + "\n")

    def write_lines(self, name: str, values: list[Any]) -> None:
        """Write one JSON document a line."""
        self.write(name, "".join(json.dumps(value) + "\n" for value in values))

    def read_json(self, name: str) -> Any:
        """The JSON document of that name, or None where there is none.

        Raises:
            UsageError: The file is no JSON.
        """
        if not self.exists(name):
            return None
        with self.filesystem.open_input_stream(self.path(name)) as stream:
            content = stream.read()
        try:
            return json.loads(content)
        except ValueError as cause:
            raise UsageError(
                f"--run-name: {name} in {self.uri} is broken ({cause}); delete it or give another --run-name"
            ) from cause

    def upload(self, folder: Path, name: str) -> None:
        """Copy the files of a folder here into one of the run's folder."""
        self._make_folder(name)
        fs.copy_files(str(folder), self.path(name), destination_filesystem=self.filesystem)

    def _make_folder(self, *names: str) -> None:
        if isinstance(self.filesystem, fs.LocalFileSystem):  # S3 has no folders
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


def _unusable(path: str, cause: Exception) -> UsageError:
    reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    reason = reason.rpartition("AWS Error ")[2].partition(" (Request ID")[0]
    return UsageError(
        f"--storage-path: {path!r} can't be written ({reason}); "
        "give a folder that you may write, or s3://bucket/prefix of a bucket that exists and your credentials reach"
    )
