"""Copies of files that change, vanish or turn into something else, and of databases, while they are copied."""

import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import frozen
from ray_on_ecs.run.files.frozen import COPIED_BYTES, freeze, is_database, open_regular
from ray_on_ecs.run.files.scan import state_of
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from tests.run_folders import Clock, Nodes, in_manifest, write

ON_DISK = pytest.mark.parametrize("storage", ["disk"], indirect=True)
SIZES = pytest.mark.parametrize("size", [10, COPIED_BYTES + 1])


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def unreadable(path: Path) -> None:
    path.write_text("1")
    path.chmod(0)


REPLACEMENTS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a socket": bind,
    "a folder": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "nothing": lambda path: None,
    "a longer file": lambda path: path.write_text("2" * 100_000),
    "a shorter file": lambda path: path.write_text("2"),
    "an empty file": Path.touch,
    "an unreadable file": unreadable,
}


@ON_DISK
@SIZES
@pytest.mark.parametrize("when", ["_copy", "open_regular"])
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_file_that_turns_into_something_else_blocks_nothing(
    storage: RunStorage,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    when: str,
    size: int,
) -> None:
    nodes = Nodes(storage, tmp_path / "disks", clock)
    monkeypatch.chdir(nodes.folder)
    write(nodes.folder, {"a": "1" * size, "b": "1"})
    module = frozen if when == "_copy" else run_folder
    original = getattr(module, when)

    def replace_before(path: Path, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, when, original)
        (nodes.folder / "a").unlink()
        REPLACEMENTS[kind](nodes.folder / "a")
        return original(path, *arguments, **options)

    monkeypatch.setattr(module, when, replace_before)
    nodes.settle()
    names = in_manifest(storage)
    assert names["b"] == "1"
    assert names.get("a") in (None, "2" * 100_000, "2", "", "-> /dev/zero", "-> nowhere", "1")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a folder", "a link to a device"])
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    REPLACEMENTS[kind](tmp_path / "a")
    with pytest.raises(OSError):  # noqa: PT011 # of each system call another one
        open_regular(tmp_path / "a")


def test_long_log_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 10)
    write(tmp_path, {"log": "a" * 11, "short": "b"})
    states = {name: state for name in ("log", "short") if (state := state_of(tmp_path / name))}
    with freeze(tmp_path, tmp_path / "frozen", states, list(states), set(states)) as found:
        assert found.copies["log"].path.samefile(tmp_path / "log")
        assert not found.copies["short"].path.samefile(tmp_path / "short")
        assert found.copies["log"].size == 11


def test_log_is_copied_by_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows while it is copied, each time."""
    write(tmp_path, {"log": "1\n"})
    original = frozen.copy_bytes

    def grow(*arguments: Any) -> int:
        with (tmp_path / "log").open("a") as log:
            log.write("more\n")
        return original(*arguments)

    monkeypatch.setattr(frozen, "copy_bytes", grow)
    state = state_of(tmp_path / "log")
    assert state
    with freeze(tmp_path, tmp_path / "frozen", {"log": state}, ["log"], {"log"}) as found:
        copy = found.copies["log"]
        text = copy.path.read_text()
    assert text == "1\n" + "more\n" * (frozen.TRIES - 1)
    assert (copy.size, copy.state.size) == (len(text), len(text))


@pytest.fixture(params=["DELETE", "TRUNCATE", "PERSIST", "WAL"])
def journal_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(journal_mode: str, storage: RunStorage, tmp_path: Path, clock: Clock) -> Any:
    """A node, and a database in its folder that stays open."""
    nodes = Nodes(storage, tmp_path / "disks", clock)
    connection = sqlite3.connect(nodes.folder / "study.db", isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={journal_mode}")
    connection.execute("CREATE TABLE trials (number)")
    yield nodes, connection
    connection.close()


def trials(storage: RunStorage, tmp_path: Path, clock: Clock) -> list[int]:
    """Return what a restart finds."""
    restored = Nodes(storage, tmp_path / f"restored{clock.now}", clock)
    assert {path.name for path in restored.folder.iterdir()} <= {"model.pt", "study.db"}
    with sqlite3.connect(restored.folder / "study.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [number for (number,) in connection.execute("SELECT number FROM trials")]


@ON_DISK
def test_open_database_is_stored_between_two_transactions(
    storage: RunStorage, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, database: Any
) -> None:
    nodes, connection = database
    open_files = {"study.db": False, "study.db-wal": False, "study.db-journal": False}
    monkeypatch.setattr(run_folder, "open_for_writing", lambda *_: open_files)
    write(nodes.folder, {"model.pt": "1"})
    for number in range(3):
        connection.execute("INSERT INTO trials VALUES (?)", (number,))
        nodes.poll(run_folder.QUIET_SECONDS)
    assert in_manifest_names(storage) == {"model.pt", "study.db"}, "it does not hold up the others"
    nodes.poll(run_folder.LOG_SECONDS)
    assert trials(storage, tmp_path, clock) == [0, 1, 2]
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO trials VALUES (?)", [(7,)] * 1000)
    nodes.poll(run_folder.LOG_SECONDS)
    assert trials(storage, tmp_path, clock) == [0, 1, 2]
    connection.execute("COMMIT")
    nodes.poll(run_folder.LOG_SECONDS)
    assert len(trials(storage, tmp_path, clock)) == 1003
    number = nodes.nodes[0].part.number
    nodes.poll(run_folder.LOG_SECONDS)
    assert nodes.nodes[0].part.number == number, "nothing has changed"


@pytest.mark.parametrize("largest", [frozen.WHOLE_BYTES, 0])
@pytest.mark.parametrize("commits", [1, 2, 1_000])
def test_script_commits_during_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int, journal_mode: str, largest: int
) -> None:
    monkeypatch.setattr(frozen, "WHOLE_BYTES", largest)
    path = tmp_path / "study.db"
    writer = sqlite3.connect(path, isolation_level=None, timeout=0.0)
    writer.execute(f"PRAGMA journal_mode={journal_mode}")
    writer.execute("CREATE TABLE trials (number, filler)")
    writer.executemany("INSERT INTO trials VALUES (0, ?)", [("a" * 4000,)] * 100)
    done = iter(range(1, commits + 1))

    class Connection(sqlite3.Connection):
        def backup(self, target: Any, *, pages: int = 0, progress: Any = None, **options: Any) -> None:
            def commit_and_look(status: int, remaining: int, total: int) -> None:
                if remaining and (number := next(done, 0)):
                    writer.execute("UPDATE trials SET number = ?", (number,))
                if progress:
                    progress(status, remaining, total)

            super().backup(target, pages=50 if pages != -1 else pages, progress=commit_and_look, **options)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, factory=Connection, **options))
    if commits > frozen.TRIES and journal_mode != "WAL" and not largest:
        with pytest.raises(OSError, match="changed in 3 attempts"):
            frozen._back_up(path, tmp_path / "copy")
        return
    frozen._back_up(path, tmp_path / "copy")
    rows = connect(tmp_path / "copy").execute("SELECT number, count(*) FROM trials GROUP BY number").fetchall()
    assert rows == [(0 if journal_mode == "WAL" else next(done, commits + 1) - 1, 100)]


def in_manifest_names(storage: RunStorage) -> set[str]:
    return set(read_snapshot(storage).files)


@ON_DISK
def test_locked_database_holds_up_nothing(
    storage: RunStorage, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "LOCKED_SECONDS", 0.1)
    nodes = Nodes(storage, tmp_path / "disks", clock)
    monkeypatch.setattr(run_folder, "open_for_writing", lambda *_: {"study.db": False})
    write(nodes.folder, {"model.pt": "1"})
    connection = sqlite3.connect(nodes.folder / "study.db", isolation_level=None)
    connection.execute("CREATE TABLE trials (number)")
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("INSERT INTO trials VALUES (1)")
    nodes.settle()
    assert in_manifest_names(storage) == {"model.pt"}
    assert nodes.nodes[0].failed == {"study.db": "SQLite: database is locked"}
    connection.close()  # as a kill does
    nodes.end()
    assert trials(storage, tmp_path, clock) == []


def test_database_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "a.pt").execute("CREATE TABLE a (b)").connection.close()
    write(tmp_path, {"b.db": "SQLite", "c.db": ""})
    (tmp_path / "folder.db").mkdir()
    names = ("a.pt", "b.db", "c.db", "folder.db", "missing")
    assert [is_database(tmp_path / name) for name in names] == [True, False, False, False, False]
