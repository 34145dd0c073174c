"""The records of a run while they grow: on a disk, in S3, and after a kill at any moment."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.run.metrics import MetricsLog
from ray_on_ecs.storage.disk import Disk
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import records as module
from ray_on_ecs.tracking.records import RecordFile, merge_records, read_records
from tests.aws import BUCKET

LAST = 24


@pytest.fixture(params=["disk", "S3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3: Any) -> RunStorage:
    return RunStorage.open(str(tmp_path) if request.param == "disk" else f"s3://{BUCKET}/{tmp_path.name}", "mine")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_RECORDS", 4)


def steps(storage: RunStorage) -> list[int]:
    return [record["step"] for record in read_records(storage)]


def attempt(storage: RunStorage) -> tuple[MetricsLog, RecordFile]:
    return MetricsLog({}, read_records(storage)), RecordFile(storage)


def make(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.advance(step)
        log.add({"loss": 1 / step})


@pytest.mark.usefixtures("small_parts")
def test_records_are_read_while_they_grow(storage: RunStorage) -> None:
    log, file = attempt(storage)
    assert steps(storage) == []
    for step in range(1, 10):
        make(log, step)
        file.write(log)
        assert steps(storage) == list(range(1, step + 1))
    file.write(log)
    assert merge_records(storage) == log.records
    lines = storage.read("metrics.jsonl").decode().splitlines()
    assert [json.loads(line) for line in lines] == log.records
    assert not storage.files("metrics"), "the parts are gone"


@pytest.mark.usefixtures("small_parts")
def test_other_files_are_not_records(storage: RunStorage) -> None:
    storage.write("metrics/notes.txt", "mine")
    log, file = attempt(storage)
    make(log, *range(1, 10))
    file.write(log)
    assert merge_records(storage) == log.records


@pytest.mark.usefixtures("small_parts")
def test_a_record_is_completed_later(storage: RunStorage) -> None:
    log, file = attempt(storage)
    for step in range(1, 10):
        make(log, step)
        file.write(log)
        log.add({"accuracy": 0.5, "seconds": None})
        file.write(log)
        assert read_records(storage) == log.records
    make(log, 9)
    log.advance(8)  # a shorter record, in the place of two
    log.add({"loss": 0})
    file.write(log)
    assert read_records(storage) == log.records
    assert len(log.records) == 8


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "in parts"])
@pytest.mark.parametrize(
    ("storage", "resumed"), [("disk", 1), ("disk", 4), ("disk", 9), ("S3", 4)], indirect=["storage"]
)
def test_steps_that_are_made_again_are_replaced(storage: RunStorage, merged: bool, resumed: int) -> None:
    log, file = attempt(storage)
    make(log, *range(1, 11))
    file.write(log)
    if merged:
        merge_records(storage)
    log, file = attempt(storage)
    assert len(log.records) == 10
    for step in range(resumed, 13):
        make(log, step)
        file.write(log)
        assert steps(storage) == list(range(1, step + 1))
    assert merge_records(storage) == log.records


def test_stored_records_are_not_rewritten(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    log, file = attempt(storage)
    make(log, *range(1, 20_001))
    file.write(log)
    written: list[int] = []
    monkeypatch.setattr(RunStorage, "write", lambda self, name, content: written.append(len(content)))
    for step in range(20_001, 20_011):
        make(log, step)
        file.write(log)
    assert len(written) == 10
    assert sum(written) < 10 * 10 * 100


def test_records_are_stored_after_a_storage_outage(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("away")

    log, file = attempt(storage)
    make(log, 1, 2)
    file.write(log)
    with monkeypatch.context() as patch:
        patch.setattr(RunStorage, "write", fail)
        for step in (3, 4):
            make(log, step)
            with pytest.raises(OSError, match="away"):
                file.write(log)
    file.write(log)
    assert steps(storage) == [1, 2, 3, 4]


class Killed(BaseException):
    """The process was killed."""


class MortalStorage(RunStorage):
    """A folder that is written until the process is killed before or after one of its changes."""

    changes_left = itertools.repeat(None)

    def write(self, name: str, content: bytes | str) -> None:
        self._change(lambda: RunStorage.write(self, name, content))

    def delete(self, name: str) -> None:
        self._change(lambda: RunStorage.delete(self, name))

    def delete_folder(self, name: str = "") -> None:
        self._change(lambda: RunStorage.delete_folder(self, name))

    def _change(self, change: Callable[[], None]) -> None:
        if next(self.changes_left, "killed"):
            raise Killed
        change()


@pytest.mark.usefixtures("small_parts")
def test_a_kill_before_any_change_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = False
    for changes in itertools.count():
        storage = MortalStorage(Disk(), str(tmp_path / str(changes)), "mine", "")
        monkeypatch.setattr(MortalStorage, "changes_left", itertools.repeat(None, changes))
        stored = 0
        try:
            for begin, end in ((1, 11), (7, 15), (2, 20), (14, LAST + 1)):  # an attempt each, of a checkpoint before
                log, file = attempt(storage)
                stored = min(stored, begin - 1)
                for step in range(begin, end):
                    make(log, step)
                    if step % 3 == 0:
                        file.write(log)
                        stored = step
                file.write(log)
                stored = end - 1
                merge_records(storage)
            done = True
        except Killed:
            pass
        monkeypatch.setattr(MortalStorage, "changes_left", itertools.repeat(None))
        found = steps(storage)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= stored
        log, file = attempt(storage)
        make(log, *range(stored + 1, LAST + 1))
        file.write(log)
        merge_records(storage)
        assert steps(storage) == list(range(1, LAST + 1))
        if done:
            break
    assert changes > 30
