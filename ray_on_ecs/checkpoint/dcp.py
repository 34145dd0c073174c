"""torch.distributed.checkpoint in a run's storage: each rank streams its part of the state to it and from it.

PyTorch's planners divide the work: every rank writes its shards, and some of the replicated tensors.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from pyarrow import NativeFile
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint import plain_pickle
from ray_on_ecs.checkpoint.index import CHUNK_BYTES, FileRecord
from ray_on_ecs.names import fault_of
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage


class StagingPlanner(DefaultSavePlanner):
    """Planner with a copy of this rank's items in host memory, so that training can continue during the write."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy the plan's tensors."""
        plan = super().finish_plan(new_plan)
        self._devices: set[torch.device] = set()
        self._staged = {item.index: self._copy(item) for item in plan.items}
        for device in self._devices:  # wait for the asynchronous copies
            torch.cuda.synchronize(device)
        self.state_dict = {}
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy of an item."""
        return self._staged[write_item.index]

    def _copy(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(item)
        if not isinstance(data, torch.Tensor):
            return data
        if data.is_cuda and torch.cuda.is_available():  # pinned memory: asynchronous, and at PCIe's full speed
            self._devices.add(data.device)
            return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data.detach(), non_blocking=True)
        return data.detach().to("cpu", copy=True)


class Writer(FileSystemWriter):
    """Writer of a checkpoint's folder, with a heartbeat for each write; an OSError from it ends the write."""

    def __init__(self, storage: RunStorage, folder: str, heartbeat: Callable[[], None] = lambda: None) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)  # StagingPlanner has made the copies
        self.files: dict[str, FileRecord] = {}  # written so far, by name
        self.fs = _Folder(storage, heartbeat, self.files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata of the global plan, with the file and offset of each rank's written items."""
        metadata.storage_data = {}
        for rank_results in results:
            metadata.storage_data |= {result.index: result.storage_data for result in rank_results}
        metadata.storage_meta = self.storage_meta()
        with self.fs.create_stream(self.fs.concat_path(self.path, layout.METADATA), "wb") as stream:
            stream.write(plain_pickle.dumps(metadata))


class Reader(FileSystemReader):
    """Sequential reader of a checkpoint's folder, with a heartbeat for each chunk."""

    def __init__(self, storage: RunStorage, folder: str) -> None:
        super().__init__(folder)
        self.fs = _Folder(storage, sdk.alive, {})

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the metadata, without running code that another has put there; ValueError if it is not metadata."""
        with self.fs.create_stream(self.fs.concat_path(self.path, layout.METADATA), "rb") as stream:
            metadata = plain_pickle.load(cast(IO[bytes], stream))
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{layout.METADATA} is not the metadata of a checkpoint")
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, in the order of their offsets."""
        in_order = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        return super().read_data(dataclasses.replace(plan, items=in_order), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """Read a whole item in chunks, with a heartbeat each; PyTorch would read many small pieces of it."""
        file.seek(sinfo.offset)
        item = io.BytesIO()
        while rest := sinfo.length - item.tell():
            sdk.alive()
            chunk = file.read(min(rest, CHUNK_BYTES))
            if not chunk:  # the file is too short, which the reader of the item reports
                break
            item.write(chunk)
        item.seek(0)
        return item


def load(state: dict[str, Any], reader: Reader) -> None:
    """Load a state's tensors in place, and replace its other values; without collectives."""
    planner = _LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _LoadPlanner(DefaultLoadPlanner):
    """Planner of a flat state, whose only values that are not tensors are bytes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = plain_pickle.load_saved(value)


class _Folder(FileSystem):
    """File system of torch.distributed.checkpoint on the run's storage; paths are names in the run's folder."""

    def __init__(self, storage: RunStorage, heartbeat: Callable[[], None], files: dict[str, FileRecord]) -> None:
        self._storage = storage
        self._heartbeat = heartbeat
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file to read it (`rb`), or to write and hash it (`wb`); ValueError for one outside the folder."""
        if mode == "rb":
            if fault := fault_of(str(path)):
                raise ValueError(f"{str(path)!r} {fault}")
            with self._storage.open_reader(str(path)) as file:
                # The buffer reads small items together: each read of the file itself is a request to S3.
                yield io.BufferedReader(cast(io.RawIOBase, file), CHUNK_BYTES)
            return
        with self._storage.open_writer(str(path)) as file:
            stream = _Hashed(file, self._heartbeat)
            yield stream
        self._files[Path(path).name] = {"bytes": stream.tell(), "sha256": stream.digest.hexdigest()}


class _Hashed(io.RawIOBase):
    """Raw output stream that counts and hashes its bytes."""

    def __init__(self, file: NativeFile, heartbeat: Callable[[], None]) -> None:
        self._file = file
        self._heartbeat = heartbeat
        self._bytes = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        self._heartbeat()
        self._file.write(data)
        self.digest.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size
