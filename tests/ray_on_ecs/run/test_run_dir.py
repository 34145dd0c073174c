"""$RUN_DIR in an S3: stored while the script runs, and back on whichever node it starts again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.run.run_dir import IDLE_SECONDS, RunFolder, local_folder
from ray_on_ecs.tracking.storage import RunStorage
from tests.aws import BUCKET


@pytest.fixture
def storage(request: pytest.FixtureRequest, s3: Any) -> RunStorage:
    return RunStorage.open(f"s3://{BUCKET}/scripts", request.node.name.replace("[", "-").rstrip("]"))


@pytest.fixture
def stored(storage: RunStorage, s3: Any) -> Callable[[], dict[str, str]]:
    """Return the contents of the stored files by name."""

    def stored() -> dict[str, str]:
        return {name: storage.read(f"files/{name}").decode() for name in storage.files("files")}

    return stored


def node(storage: RunStorage, folder: Path) -> RunFolder:
    found = RunFolder(storage, folder)
    found.restore()
    return found


Stored = Callable[[], dict[str, str]]


def test_a_file_is_stored_when_it_has_not_changed_for_a_moment(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder = node(storage, tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "snapshot.pt").write_text("1")
    folder.store(0.0)
    assert stored() == {}, "it may still be written"
    folder.store(2.0)
    assert stored() == {"deep/snapshot.pt": "1"}


def test_a_file_that_is_being_written_is_stored_when_it_is_closed(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder, me = node(storage, tmp_path), [psutil.Process()]
    with (tmp_path / "snapshot.pt").open("w") as file:
        file.write("half")
        file.flush()
        for now in (0.0, 2.0, 4.0):
            folder.store(now, me)
        assert stored() == {}
        file.write(" and half")
    folder.store(6.0, me)
    folder.store(8.0, me)
    assert stored() == {"snapshot.pt": "half and half"}


def test_a_log_that_stays_open_is_stored_as_it_is(storage: RunStorage, tmp_path: Path, stored: Stored) -> None:
    folder, me = node(storage, tmp_path), [psutil.Process()]
    with (tmp_path / "held.log").open("w") as held, (tmp_path / "appended.log").open("a") as appended:
        for file in (held, appended):
            file.write("line")
            file.flush()
        folder.store(0.0, me)
        folder.store(2.0, me)
        assert stored() == {"appended.log": "line"}
        folder.store(IDLE_SECONDS, me)
        assert stored() == {"appended.log": "line", "held.log": "line"}


def test_the_last_store_waits_for_nothing(storage: RunStorage, tmp_path: Path, stored: Stored) -> None:
    folder = node(storage, tmp_path)
    (tmp_path / "model.pt").write_text("1")
    folder.store(0.0, is_last=True)
    assert stored() == {"model.pt": "1"}


def test_a_file_that_is_renamed_replaces_the_old_one_and_a_deleted_one_goes(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder = node(storage, tmp_path)
    for name in ("snapshot.pt", "old.pt"):
        (tmp_path / name).write_text("1")
    folder.store(0.0, is_last=True)
    (tmp_path / "new").write_text("2")
    (tmp_path / "new").rename(tmp_path / "snapshot.pt")
    (tmp_path / "old.pt").unlink()
    folder.store(2.0)
    folder.store(4.0)
    assert stored() == {"snapshot.pt": "2"}


def test_a_file_that_is_replaced_again_and_again_is_stored_each_time_after_what_it_speaks_of(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder, file = node(storage, tmp_path), tmp_path / "newest"

    def replace(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    replace("1")
    folder.store(0.0)
    replace("2")
    folder.store(2.0)
    assert stored() == {"newest": "2"}, "it was renamed, so it is complete"
    (tmp_path / "3").write_text("state")
    os.utime(tmp_path / "3", (1, 1))
    replace("3")
    folder.store(4.0)
    assert stored() == {"newest": "2"}, "the file 3 may not be complete"
    folder.store(6.0)
    assert stored() == {"newest": "3", "3": "state"}


def test_another_node_finds_the_stored_files_and_no_others(storage: RunStorage, tmp_path: Path, stored: Stored) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    folder = node(storage, first)
    (first / "deep").mkdir()
    (first / "deep" / "snapshot.pt").write_text("1")
    folder.store(0.0, is_last=True)
    second.mkdir()
    (second / "left over").write_text("of a part of the run that was not stored")
    other = node(storage, second)
    assert [str(each.relative_to(second)) for each in second.rglob("*") if each.is_file()] == ["deep/snapshot.pt"]
    assert (second / "deep" / "snapshot.pt").read_text() == "1"
    (second / "deep" / "snapshot.pt").write_text("two")
    other.store(0.0, is_last=True)
    node(storage, first)
    assert (first / "deep" / "snapshot.pt").read_text() == "two"


def test_what_a_node_has_already_is_not_fetched_again(storage: RunStorage, tmp_path: Path) -> None:
    folder = node(storage, tmp_path)
    (tmp_path / "snapshot.pt").write_text("1")
    folder.store(0.0, is_last=True)
    node(storage, tmp_path)
    before = os.stat(tmp_path / "snapshot.pt").st_ino, os.stat(tmp_path / "snapshot.pt").st_ctime_ns
    node(storage, tmp_path)
    assert (os.stat(tmp_path / "snapshot.pt").st_ino, os.stat(tmp_path / "snapshot.pt").st_ctime_ns) == before


def test_files_that_were_restored_are_not_stored_again(storage: RunStorage, tmp_path: Path) -> None:
    folder = node(storage, tmp_path / "first")
    (tmp_path / "first" / "snapshot.pt").write_text("1")
    folder.store(0.0, is_last=True)
    [before] = storage.files("files").values()
    node(storage, tmp_path / "second").store(0.0, is_last=True)
    [after] = storage.files("files").values()
    assert after.mtime_ns == before.mtime_ns


def test_on_a_disk_that_all_nodes_share_it_is_the_folder_itself(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "mine")
    folder = local_folder(storage)
    node(storage, folder).store(0.0)
    (folder / "snapshot.pt").write_text("1")
    assert storage.read("files/snapshot.pt") == b"1"


def test_nothing_is_deleted_and_no_renamed_file_stored_before_a_new_one_is(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder, me = node(storage, tmp_path), [psutil.Process()]

    def point_to(name: str) -> None:
        (tmp_path / "tmp").write_text(name)
        (tmp_path / "tmp").rename(tmp_path / "newest")

    (tmp_path / "1.pt").write_text("one")
    point_to("1.pt")
    folder.store(0.0, is_last=True)
    with (tmp_path / "2.pt").open("w") as file:
        file.write("half")
        file.flush()
        folder.store(2.0, me)
        file.write(" and half")
    point_to("2.pt")
    (tmp_path / "1.pt").unlink()
    folder.store(4.0, me)
    assert stored() == {"newest": "1.pt", "1.pt": "one"}
    folder.store(6.0, me)
    assert stored() == {"newest": "2.pt", "2.pt": "half and half"}


def test_what_every_node_has_restored_is_deleted_by_the_first_one_alone(
    storage: RunStorage, tmp_path: Path, stored: Stored
) -> None:
    folder = node(storage, tmp_path / "first")
    for name in ("old.pt", "kept.pt"):
        (tmp_path / "first" / name).write_text("1")
    folder.store(0.0, is_last=True)
    other = RunFolder(storage, tmp_path / "second", is_first=False)
    other.restore()
    (tmp_path / "second" / "own.pt").write_text("2")
    other.store(0.0, is_last=True)
    for name in ("old.pt", "own.pt"):
        (tmp_path / "second" / name).unlink()
    other.store(2.0)
    assert set(stored()) == {"old.pt", "kept.pt"}, "it deletes its own"
    (tmp_path / "first" / "old.pt").unlink()
    folder.store(2.0)
    assert set(stored()) == {"kept.pt"}
