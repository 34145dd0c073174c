"""Nodes of a run whose folders are polled by hand: each has a separate disk, and the clock of the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from ray_on_ecs.run.exchange import Exchange
from ray_on_ecs.run.files import folder as module
from ray_on_ecs.run.files import node_files
from ray_on_ecs.run.files.folder import RunFolder
from ray_on_ecs.run.files.moment import Moments
from ray_on_ecs.run.files.node_files import NodeFiles
from ray_on_ecs.run.group import Directive, FilesStatus, Peer
from ray_on_ecs.storage.disk import Disk
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot

# Until all have looked, the driver has heard of it, they have looked again, it has heard of that, and they of it.
ROUNDS = 5


class Clock:
    """A clock in place of `time` that only a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files, in place where they exist."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(folder: Path) -> dict[str, str]:
    """Return the contents of a folder: the text of each file, and `-> TARGET` of each link."""
    found: dict[str, str] = {}
    for above, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(above, name)
            if path.is_symlink():
                found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[str(path.relative_to(folder))] = path.read_text()
    return found


def in_manifest(storage: RunStorage) -> dict[str, str]:
    """Return the files that the last snapshot restores, in the form of `contents`."""
    files = read_snapshot(storage).files
    return {n: f"-> {k.link}" if k.link is not None else storage.read(k.key).decode() for n, k in files.items()}


def make_folder(
    storage: RunStorage,
    disk: Path,
    node: int = 0,
    code: Mapping[str, str] | Callable[[Path], None] | None = None,
    **options: Any,
) -> RunFolder:
    """Return the folder of a node with this disk; the code writes itself, or a value `-> TARGET` of it is a link."""

    def place(folder: Path) -> None:
        if callable(code):
            code(folder)
            return
        folder.mkdir()
        write(folder, {name: text for name, text in (code or {}).items() if not text.startswith("-> ")})
        for name, text in (code or {}).items():
            if text.startswith("-> "):
                (folder / name).symlink_to(text[3:])

    with patch.object(module, "node_folder", lambda kind, key: disk):
        return RunFolder(storage, "code", node, place, **options)


class Nodes:
    """The nodes of one attempt of a run, which have been reset.

    Args:
        storage: The run's folder.
        disks: A folder that holds their disks.
        clock: The clock.
        count: Their number.
        code: The user's code.
        options: More arguments of the folders.
    """

    def __init__(
        self,
        storage: RunStorage,
        disks: Path,
        clock: Clock,
        count: int = 1,
        code: Mapping[str, str] | Callable[[Path], None] | None = None,
        **options: Any,
    ) -> None:
        self._storage, self._clock = storage, clock
        self.nodes = [make_folder(storage, disks / str(node), node, code, **options) for node in range(count)]
        self.writers: tuple[psutil.Process, ...] = ()
        self.restart()

    def restart(self) -> None:
        """Reset all nodes, whose scripts have ended, and forget what the driver knew."""
        for node in self.nodes:
            node.reset()
        count = len(self.nodes)
        peers = [Peer("127.0.0.1", 1, node) for node in range(count)]
        self.exchanges = [Exchange() for _ in self.nodes]
        self.files = [
            NodeFiles(self._storage, each, exchange, peers, node)
            for node, (each, exchange) in enumerate(zip(self.nodes, self.exchanges, strict=True))
        ]
        self._moments = Moments()
        self.directive = Directive()
        self._polls = 0

    @property
    def folder(self) -> Path:
        return self.nodes[0].folder

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.now += seconds

    def tell(self, node: int) -> FilesStatus:
        """Poll a node as the driver does; return its status."""
        self._polls += 1
        status = self.exchanges[node].poll(self._polls, self.directive, -1, 0)[1].files
        assert status
        count = len(self.nodes)
        if count > 1:
            self._moments.hear(node, status, self._polls + 1)
            common, scan = self._moments.common(count), self._moments.needs_look(count)
            self.directive = replace(self.directive, commit=common, scan=scan)
        return status

    def look(self, node: int) -> None:
        """Let a node look at its folder."""
        with patch.object(node_files, "writers_of", lambda pids: list(self.writers)):
            self.files[node]._look()

    def poll(self, seconds: float = 0.0) -> None:
        """Let time pass, and then so little that nothing changes while driver and nodes find a common moment."""
        self.wait(seconds)
        for _ in range(ROUNDS if len(self.nodes) > 1 else 1):
            for node in range(len(self.nodes)):
                self.tell(node)
            for node in range(len(self.nodes)):
                self.look(node)

    def settle(self, polls: int = 6) -> None:
        """Poll until a change has been stored and committed."""
        for _ in range(polls):
            self.poll(module.QUIET_SECONDS)

    def end(self, killed: Mapping[int, float | None] | None = None) -> None:
        """Store the last snapshot: all scripts have ended, some by a kill."""
        count = len(self.nodes)
        self.directive = replace(self.directive, ended=frozenset(range(count)), killed=killed or {})
        for node, each in enumerate(self.files):
            self.tell(node)
            each.store_last()
        statuses = [self.tell(node) for node in range(count)]
        if all(status.is_last for status in statuses):
            commit = {node: status.part for node, status in enumerate(statuses)}
            self.exchanges[0].poll(self._polls, replace(self.directive, commit=commit), -1, 0)
            self.files[0].commit_last()
        for exchange in self.exchanges:
            if reason := exchange.status.not_stored:
                raise Fault(reason)


# Starts the nodes of a run: see the fixture `start`.
Start = Callable[..., Nodes]


class Fault(OSError):
    """The fault of a test."""


class FaultyStorage(RunStorage):
    """A run's folder whose calls fail on request of the test.

    Attributes:
        calls: The number of changing calls so far.
        fails: Given the number of such a call, returns the time of its failure: before or after execution, or never.
    """

    calls: int
    fails: Callable[[int], str | None]

    @classmethod
    def of(cls, storage: RunStorage, fails: Callable[[int], str | None]) -> FaultyStorage:
        found = cls(storage.store, storage.base, storage.run_name, storage.uri)
        object.__setattr__(found, "calls", 0)
        object.__setattr__(found, "fails", fails)
        object.__setattr__(found, "store", _Faulty(storage.store, found))
        return found

    @property
    def is_local(self) -> bool:
        return isinstance(getattr(self.store, "wrapped", self.store), Disk)

    def due(self) -> str | None:
        object.__setattr__(self, "calls", self.calls + 1)
        return self.fails(self.calls)


class _Faulty:
    """A disk or a bucket that asks before each call whether to fail."""

    def __init__(self, wrapped: Any, storage: FaultyStorage) -> None:
        self.wrapped, self._storage = wrapped, storage

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.wrapped, name)

        def faulty(*args: Any, **options: Any) -> Any:
            fate = self._storage.due()
            if fate == "before":
                raise Fault(f"{name} {args}")
            result = call(*args, **options)
            if fate == "after":
                if name == "writing":
                    return _lost(result)
                raise Fault(f"the answer to {name} {args}")
            return result

        return faulty


@contextmanager
def _lost(writing: AbstractContextManager[Any]) -> Generator[Any]:
    """Write a file that is stored, and then raise an error."""
    with writing as stream:
        yield stream
    raise Fault("the answer to a write")
