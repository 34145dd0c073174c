"""torch.distributed.checkpoint on a run's folder: every rank streams its part of the state there, or reads its own.

The planners of PyTorch decide who writes and reads what: of tensors that several ranks have alike, each writes some.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from pyarrow import NativeFile
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_on_ecs.checkpoint.manifest import CHUNK_BYTES, FileRecord, Heartbeat
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage


class StagingPlanner(DefaultSavePlanner):
    """Copies what this rank will write into host memory, so that training can change it while it is written."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy the plan's tensors."""
        plan = super().finish_plan(new_plan)
        self._devices: set[torch.device] = set()
        self._staged = {item.index: self._copy(item) for item in plan.items}
        for device in self._devices:  # until the copies are there
            torch.cuda.synchronize(device)
        self.state_dict = {}
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy."""
        return self._staged[write_item.index]

    def _copy(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(item)
        if not isinstance(data, torch.Tensor):
            return data
        if data.is_cuda and torch.cuda.is_available():  # all copies at once, at the speed of pinned memory
            self._devices.add(data.device)
            return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data.detach(), non_blocking=True)
        return data.detach().to("cpu", copy=True)


class Writer(FileSystemWriter):
    """Writes a checkpoint's folder, with a heartbeat for each write, which may end it by an OSError.

    Attributes:
        files: The files that it has written, by name.
    """

    def __init__(self, storage: RunStorage, folder: str, heartbeat: Heartbeat = lambda: None) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)  # the copies are there
        self.files: dict[str, FileRecord] = {}
        self.fs = _Folder(storage, heartbeat, self.files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata: which file holds what.

        Args:
            metadata: From the global plan.
            results: What each rank has written.
        """
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
        metadata.storage_meta = self.storage_meta()
        with self.fs.create_stream(self.fs.concat_path(self.path, layout.METADATA), "wb") as stream:
            pickle.dump(metadata, cast(IO[bytes], stream))


class Reader(FileSystemReader):
    """Reads a checkpoint's folder in order, in chunks, each with a heartbeat."""

    def __init__(self, storage: RunStorage, folder: str, heartbeat: Heartbeat) -> None:
        super().__init__(folder)
        self.fs = _Folder(storage, heartbeat, {})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, as it lies in the files."""
        in_order = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        return super().read_data(dataclasses.replace(plan, items=in_order), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """Read an item whole: PyTorch would read it in bits and pieces, each a call to S3."""
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))


def load(state: dict[str, Any], reader: Reader) -> None:
    """Fill a state's tensors in place, and replace its other values; each rank reads what it needs, by itself."""
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _Folder(FileSystem):
    """The run's folder as a file system of torch.distributed.checkpoint; paths are names in the run's folder."""

    def __init__(self, storage: RunStorage, heartbeat: Heartbeat, files: dict[str, FileRecord]) -> None:
        self._storage = storage
        self._heartbeat = heartbeat
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file to read it (`rb`) or to write and hash it (`wb`)."""
        if mode == "rb":
            with self._storage.open_reader(str(path)) as file:
                yield io.BufferedReader(_Chunks(file, self._heartbeat), CHUNK_BYTES)
            return
        with self._storage.open_writer(str(path)) as file:
            stream = _Hashed(file, self._heartbeat)
            yield stream
        self._files[Path(path).name] = stream.record()


class _Chunks(io.RawIOBase):
    """A file to read, with a heartbeat for each chunk."""

    def __init__(self, file: NativeFile, heartbeat: Heartbeat) -> None:
        self._file = file
        self._heartbeat = heartbeat

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        self._heartbeat()
        return self._file.readinto(memoryview(buffer)[:CHUNK_BYTES])


class _Hashed(io.RawIOBase):
    """A file to write, whose bytes are counted and hashed on their way."""

    def __init__(self, file: NativeFile, heartbeat: Heartbeat) -> None:
        self._file = file
        self._heartbeat = heartbeat
        self._bytes = 0
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        self._heartbeat()
        self._file.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def record(self) -> FileRecord:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}
