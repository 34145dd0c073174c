"""Workers that are threads, with real scripts and files: starts, ends, lost drivers and errors."""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.private_folder import node_folder
from ray_on_ecs.run import exchange as exchange_module
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.group import Directive, Place, WorkerRank, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.launcher import TorchrunLauncher
from ray_on_ecs.run.thread_group import ThreadGroup
from ray_on_ecs.run.worker import ScriptWorker, Settings
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from tests.run_folders import in_manifest
from tests.waiting import until

# Writes a file, and another one at SIGTERM.
SCRIPT = """
import os, signal, sys, time

def save(number, frame):
    print("saved", file=open("saved", "w"))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print(f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", file=open("begun", "w"))
time.sleep(600)
"""
OF_EACH_RANK = """
import os
print(os.environ["LOCAL_RANK"], "of", os.environ["WORLD_SIZE"], file=open("rank" + os.environ["RANK"], "w"))
"""

ARGUMENTS = """
import os, sys
print(sys.argv[1:], file=open("arguments" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w"))
"""


class Workers:
    """A group of threads, which a test polls as the driver does."""

    def __init__(self, folder: Path, count: int = 1, script: str = "train.py", *, is_one_node: bool = True) -> None:
        self.storage = RunStorage.open(str(folder / "storage"), "mine")
        self.storage.write_json(layout.SETTINGS, {})
        given: dict[str, Any] = {"storage_path": str(folder / "storage"), "run_name": "mine", "num_workers": count}
        config = RunConfig(command=(script,), resume_args="--resume 'a b'", **given)
        settings = Settings(
            config=config,
            storage=self.storage,
            threads=1,
            use_gpu=False,
            code=Code(name="code", archive=""),
            is_one_node=is_one_node,
            run_id="first",
            inputs={},
            cluster="",
            launcher=TorchrunLauncher(),
        )
        self.settings = settings
        self.group = ThreadGroup(settings, count)
        self.directive = Directive()

    def poll(self) -> WorkerStatuses:
        statuses = self.group.poll(self.directive)
        peers = [worker.peer for worker in statuses.values() if worker.generation == self.directive.generation]
        if not self.directive.peers and len(peers) == len(self.group.ranks) and all(peers):
            self.say(peers=tuple(peers))
        if all(worker.has_ended for worker in statuses.values()):
            self.say(ended=frozenset({0}))
        return statuses

    def say(self, **changes: object) -> None:
        self.directive = Directive(**{**vars(self.directive), **changes})  # ty: ignore[invalid-argument-type]

    def until(self, **wanted: object) -> WorkerStatus:
        """Poll until rank 0's status has these values."""

        def has_them() -> WorkerStatus | None:
            status = self.poll()[0]
            return status if all(getattr(status, name) == value for name, value in wanted.items()) else None

        return until(has_them, between=0)

    def until_begun(self) -> None:
        until(lambda: all(worker.started_at for worker in self._healthy().values()), between=0)

    def _healthy(self) -> WorkerStatuses:
        statuses = self.poll()
        assert not any(worker.error for worker in statuses.values()), [worker.where for worker in statuses.values()]
        return statuses


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(code: Code, folder: Path) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "of_each_rank.py").write_text(OF_EACH_RANK)
        (folder / "arguments.py").write_text(ARGUMENTS)

    monkeypatch.setattr(Code, "place", place)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    workers.say(action="leave")
    workers.until(has_left=True)


def test_script_that_is_ended_may_save(workers: Workers) -> None:
    workers.until_begun()
    until(lambda: list(Path(workers.storage.path()).rglob("begun")))
    workers.say(action="end", end_at=2e9)
    assert workers.until(is_stored=True).status == 0
    assert in_manifest(workers.storage) == {"begun": "0-0\n", "saved": "saved\n"}


def test_next_start_has_the_files_of_the_last(workers: Workers) -> None:
    workers.until_begun()
    until(lambda: list(Path(workers.storage.path()).rglob("begun")))
    workers.say(action="end", end_at=2e9)
    workers.until(is_stored=True)
    workers.directive = Directive(1)
    folder = Path(workers.storage.path("files/code"))

    def has_begun() -> bool:
        workers.poll()
        with suppress(FileNotFoundError):  # the folder is deleted and created again
            return (folder / "begun").read_text() == "0-1\n"
        return False

    until(has_begun, between=0)
    assert (folder / "saved").read_text() == "saved\n"


def test_resume_args_are_given_to_a_start_that_finds_files(tmp_path: Path) -> None:
    workers = Workers(tmp_path, script="arguments.py")
    for generation, resumes in enumerate((False, True)):
        workers.directive = Directive(generation, resumes=resumes)
        workers.until(status=0, generation=generation, is_stored=True)
    folder = tmp_path / "storage" / "mine" / "files" / "code"
    assert [(folder / f"arguments{number}").read_text() for number in "01"] == ["[]\n", "['--resume', 'a b']\n"]
    workers.say(action="leave")
    workers.until(has_left=True)
    workers.group.close()


def test_start_that_ends_before_all_have_met_starts_nothing(workers: Workers) -> None:
    workers.group.poll(workers.directive)
    until(lambda: workers.group.poll(workers.directive)[0].peer)
    workers.directive = Directive(action="end")
    status = workers.until(is_stored=True)
    assert (status.started_at, status.status) == (None, None)
    assert in_manifest(workers.storage) == {}


def test_driver_that_is_lost_ends_the_script(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script leaves is not stored: its worker does not know how the others have ended."""
    workers.until_begun()
    until(lambda: list(Path(workers.storage.path()).rglob("begun")))
    monkeypatch.setattr(exchange_module, "DRIVER_LOST_SECONDS", 1.0)
    exchange = workers.group._exchanges[0]
    until(lambda: exchange.status.has_left)
    status = exchange.status
    assert status.status == 0
    assert "the driver has not answered for 600 s" in str(status.error)
    assert in_manifest(workers.storage).get("saved") is None


def test_error_of_a_worker_is_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: Code, folder: Path) -> None:
        raise LookupError("no code")

    monkeypatch.setattr(Code, "place", fail)
    workers = Workers(tmp_path)
    status = workers.until(has_left=True)
    assert str(status.error) == "LookupError('no code')"
    assert "in fail" in status.where
    assert status.is_stored


def test_ranks_of_a_machine_share_its_folder(tmp_path: Path) -> None:
    workers = Workers(tmp_path, count=2, script="of_each_rank.py")
    workers.until(is_stored=True)
    assert in_manifest(workers.storage) == {"rank0": "0 of 2\n", "rank1": "1 of 2\n"}
    workers.say(action="leave")
    until(lambda: all(worker.has_left for worker in workers.poll().values()), between=0)


class Pieces(io.StringIO):
    """A stream that keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def test_lines_of_ranks_that_print_at_once_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lines = range(4), [f"step {step}" for step in range(50)]
    settings = Workers(tmp_path, count=len(ranks)).settings
    places = [WorkerRank(rank, len(ranks), local_rank=rank, local_world_size=len(ranks)) for rank in ranks]
    workers = [ScriptWorker(settings, place, Place()) for place in places]
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    start = threading.Barrier(len(ranks))

    def print_all(worker: ScriptWorker) -> None:
        start.wait(60)
        for number, line in enumerate(lines):
            worker._on_line(line if number == len(lines) - 1 else f"{line}\n")  # the last one has no end

    threads = [threading.Thread(target=print_all, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in ranks:  # a piece is never cut by another thread
        assert [piece for piece in out.pieces if piece.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] {line}\n" for line in lines
        ]
    assert len(out.pieces) == len(ranks) * len(lines)


@pytest.mark.parametrize("others_follow", [True, False])
def test_folder_stays_for_another_group_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_follow: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    workers = Workers(tmp_path, script="of_each_rank.py", is_one_node=False)
    workers.until(is_stored=True)
    workers.say(action="leave", others_follow=others_follow)
    workers.until(has_left=True)
    folder = node_folder("runs", f"{workers.storage.uri} ")
    assert [each.name for each in folder.rglob("rank0")] == ["rank0"] * others_follow
