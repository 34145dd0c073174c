"""The log of a command, where its output goes into a file."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pytest

from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import run_log
from ray_on_ecs.tracking.run_log import RunLog

NAME = "logs/20261123T181500Z.txt"
STARTED = datetime(2026, 11, 23, 18, 15, tzinfo=UTC)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "runs"), "mine")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[IO[str]]:
    """The file that a job's output goes into; it can't be read through this."""
    with (tmp_path / "job.log").open("a") as file:
        yield file


@pytest.fixture
def log(storage: RunStorage, output: IO[str]) -> RunLog:
    return RunLog(storage, STARTED, output.fileno())


def printed(output: IO[str], text: str) -> None:
    output.write(text)
    output.flush()


def test_log_is_named_by_the_commands_start(storage: RunStorage, output: IO[str], log: RunLog) -> None:
    for text in ("epoch 1\n", "epoch 2\nepoch 3"):
        printed(output, text)
        log.store()
    assert storage.read(NAME) == b"epoch 1\nepoch 2\nepoch 3"


def test_stack_of_sigterm_is_left_out(storage: RunStorage, output: IO[str], log: RunLog) -> None:
    printed(output, "*** SIGTERM received at time=1795616332 on cpu 1 ***\nepoch 1\n")
    log.store()
    assert storage.read(NAME) == b"epoch 1\n"


def test_unchanged_log_is_not_stored_again(storage: RunStorage, output: IO[str], log: RunLog) -> None:
    printed(output, "epoch 1\n")
    log.store()
    storage.delete(NAME)
    log.store()
    assert not storage.exists(NAME)
    printed(output, "epoch 2\n")
    log.store()
    assert storage.exists(NAME)


def test_long_log_is_cut_at_a_line(
    monkeypatch: pytest.MonkeyPatch, storage: RunStorage, output: IO[str], log: RunLog
) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 20)
    printed(output, "".join(f"line {number}\n" for number in range(1000)))
    log.store()
    assert storage.read(NAME) == b"line 998\nline 999\n"


def test_a_pipe_leaves_no_log(storage: RunStorage) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"epoch 1\n")
        RunLog(storage, STARTED, writer).store()
    finally:
        os.close(reader)
        os.close(writer)
    assert not Path(storage.path()).exists()


def test_a_storage_that_fails_is_tried_again(storage: RunStorage, output: IO[str], log: RunLog) -> None:
    printed(output, "epoch 1\n")
    folder = Path(storage.path("logs"))
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    log.store()
    folder.unlink()
    log.store()
    assert storage.read(NAME) == b"epoch 1\n"
