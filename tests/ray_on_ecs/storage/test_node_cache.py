"""Caches on a node's disk: made once, held by who uses them, deleted when the disk needs room."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_on_ecs.storage import node_cache
from tests.vanishing import goes_when_listed

DAY = 24 * 3600.0
Disk = Callable[[int], None]


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(node_cache, "_held", {})
    yield tmp_path
    leave()


def leave() -> None:
    """Let go of all caches, as a process does that ends."""
    for descriptor in node_cache._held.values():
        os.close(descriptor)
    node_cache._held.clear()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, root: Path) -> Disk:
    """Sets the number of caches for which the disk has room, of one byte each."""
    usage = namedtuple("usage", "free")

    def with_room_for(number: int) -> None:
        monkeypatch.setattr(node_cache.shutil, "disk_usage", lambda folder: usage(number - len(kept(root))))

    with_room_for(100)
    return with_room_for


def make(kind: str, name: str, days_ago: float) -> Path:
    """Make a cache that was last used some days ago."""
    folder = node_cache.cached(kind, name, lambda folder: folder.mkdir())
    (folder / name).touch()
    leave()
    then = time.time() - days_ago * DAY
    os.utime(f"{folder}.used", (then, then))
    return folder


def kept(root: Path) -> set[str]:
    return {path.name for path in root.glob("ray-on-ecs-*/*/*/*")}


@pytest.mark.parametrize(
    ("room", "needed", "expected"),
    [
        (100, 1, {"new", "middle", "old"}),
        (4, 1, {"new", "middle", "old"}),
        (4, 2, {"new", "middle"}),
        (4, 3, {"new"}),
        (4, 9, set()),
    ],
)
def test_least_recently_used_goes_first(root: Path, disk: Disk, room: int, needed: int, expected: set[str]) -> None:
    for kind, name, days in (("inputs", "old", 20), ("packages", "middle", 10), ("inputs", "new", 1)):
        make(kind, name, days)
    disk(room)
    node_cache.make_room(needed)
    assert kept(root) == expected


def test_caches_go_by_age(root: Path, disk: Disk) -> None:
    old, _ = make("inputs", "old", 31), make("inputs", "new", 29)
    node_cache.make_room(0)
    assert kept(root) == {"new"}
    assert [path.name for path in old.parent.glob(f"{old.name}*")] == [f"{old.name}.lock"]


def test_a_use_makes_a_cache_new(root: Path, disk: Disk) -> None:
    folder = make("inputs", "old", 31)
    assert node_cache.cached("inputs", "old", lambda folder: pytest.fail("it is there")) == folder
    leave()
    node_cache.make_room(0)
    assert kept(root) == {"old"}


def test_caches_of_this_process_and_others_stay(root: Path, disk: Disk) -> None:
    mine, others, free = (make("inputs", name, 31) for name in ("mine", "others", "free"))
    node_cache.hold(mine)
    script = "import sys; from pathlib import Path; from ray_on_ecs.storage import node_cache\n"
    script += "node_cache.hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(others)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "\n"
        disk(0)
        node_cache.make_room(1)
        assert kept(root) == {"mine", "others"}
        process.kill()
    node_cache.make_room(1)
    assert kept(root) == {"mine"}
    assert not free.exists()


def test_a_cache_that_is_being_made_stays(root: Path, disk: Disk) -> None:
    begun, done = threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        folder.mkdir()
        (folder / "made").touch()
        begun.set()
        assert done.wait(30)

    thread = threading.Thread(target=node_cache.cached, args=("inputs", "slow", slowly))
    thread.start()
    assert begun.wait(30)
    disk(0)
    node_cache.make_room(1)
    done.set()
    thread.join()
    assert kept(root) == {"made"}


def test_what_was_not_finished_is_made_anew(root: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "part").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        node_cache.cached("inputs", "a", fail)
    folder = node_cache.cached("inputs", "a", lambda folder: (folder / "whole").mkdir(parents=True))
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_folder_that_disappears_meanwhile_is_passed_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a run of mpirun, which ends while another run restarts on this node."""
    (place := node_cache.temporary() / "mpi-1").mkdir()
    goes_when_listed(monkeypatch, place)
    node_cache.make_room(0)
    assert not place.exists()
