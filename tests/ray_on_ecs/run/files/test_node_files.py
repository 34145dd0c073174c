"""Snapshots of several nodes: complete, of one moment, and never torn after any failed storage call."""

import os
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import node_files
from ray_on_ecs.run.files.folder import LOOK_SECONDS, OVERDUE_SECONDS, POLL_SECONDS, QUIET_SECONDS
from ray_on_ecs.run.files.known import KNOWN
from ray_on_ecs.run.files.node_files import merge_parts
from ray_on_ecs.run.files.scan import RESTLESS_SECONDS
from ray_on_ecs.run.group import Directive
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, publish, read_snapshot, write_snapshot
from tests.local_cluster import have_ended
from tests.run_folders import Clock, Fault, FaultyStorage, Nodes, Start, contents, in_manifest, write
from tests.waiting import until

ON_DISK = pytest.mark.parametrize("storage", ["disk"], indirect=True)
# In S3 each call takes long.
NODES = pytest.mark.parametrize(("storage", "count"), [("disk", 1), ("disk", 2), ("s3", 2)], indirect=["storage"])


def test_all_nodes_have_all_files(storage: RunStorage, start: Start) -> None:
    first = start(2)
    for node, each in enumerate(first.nodes):
        write(each.folder, {f"shard{node}": str(node)})
    first.settle()
    assert in_manifest(storage) == {"shard0": "0", "shard1": "1"}
    second = start(2)
    for each in second.nodes:
        assert contents(each.folder) == in_manifest(storage)
    (second.nodes[1].folder / "shard1").unlink()
    second.settle()
    assert in_manifest(storage) == {"shard0": "0"}
    assert len(storage.files("files")) + len(storage.files("versions")) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_next_group_restores_only_what_differs(storage: RunStorage, tmp_path: Path, clock: Clock, count: int) -> None:
    first = Nodes(storage, tmp_path / "disks", clock, 2)
    names = ("same", "changed", "deleted", "torn")
    for node, each in enumerate(first.nodes):
        write(each.folder, {f"{name}{node}": f"{name} {node}" for name in names})
    first.settle()
    files = in_manifest(storage)
    for each in first.nodes:  # of a restart, after which each node has the files of both
        each.reset()
    with ExitStack() as opened:  # so that a new file does not get the inode of a deleted one
        before = [
            {name: os.fstat(opened.enter_context((node.folder / name).open()).fileno()) for name in files}
            for node in first.nodes
        ]
        for each in first.nodes:
            each.keep()
            for node in range(2):
                (each.folder / f"deleted{node}").unlink()
                write(each.folder, {f"changed{node}": "CHANGED 0", f"torn{node}": "to", "new": "new"})
        second = Nodes(storage, tmp_path / "disks", clock, count)
        for node, each in enumerate(second.nodes):
            assert contents(each.folder) == files
            if node < 2:
                stays = {name for name in files if os.path.samestat((each.folder / name).stat(), before[node][name])}
                assert stays == {"same0", "same1"}


@ON_DISK
def test_file_that_was_not_stored_is_not_taken_for_the_stored_one(
    storage: RunStorage, tmp_path: Path, clock: Clock
) -> None:
    """It was too large, and the part without it was not committed."""
    first = Nodes(storage, tmp_path / "disks", clock, 2, max_bytes=10)
    write(first.folder, {"a": "1"})
    first.settle()
    write(first.folder, {"a": "1" * 11})
    for _ in range(2):
        first.wait(QUIET_SECONDS)
        first.look(0)
    assert first.nodes[0].part.files == {}
    first.nodes[0].keep()
    assert contents(Nodes(storage, tmp_path / "disks", clock, 2).folder) == {"a": "1"}


@ON_DISK
@pytest.mark.parametrize("record", ["", '{"a": [{}', "\0"])
def test_torn_record_of_a_folder_counts_as_none(storage: RunStorage, tmp_path: Path, clock: Clock, record: str) -> None:
    first = Nodes(storage, tmp_path / "disks", clock)
    write(first.folder, {"a": "1"})
    first.settle()
    (tmp_path / "disks" / "0" / KNOWN).write_text(record)
    write(first.folder, {"a": "2"})
    assert contents(Nodes(storage, tmp_path / "disks", clock).folder) == {"a": "1"}


@ON_DISK
@pytest.mark.parametrize("count", [1, 2, 4])
def test_changed_node_count_keeps_all_files(storage: RunStorage, start: Start, count: int) -> None:
    first = start(3)
    for node, each in enumerate(first.nodes):
        write(each.folder, {f"shard{node}": str(node)})
    first.settle()
    second = start(count)
    write(second.folder, {"shard0": "new"})
    second.settle()
    assert in_manifest(storage) == {"shard0": "new", "shard1": "1", "shard2": "2"}
    for name in ("shard1", "shard2"):
        for each in second.nodes:
            (each.folder / name).unlink()
    second.end()
    assert in_manifest(storage) == {"shard0": "new"}


@ON_DISK
def test_first_node_wins_with_one_warning(
    storage: RunStorage, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(2)
    for number in range(3):
        for node, each in enumerate(first.nodes):
            write(each.folder, {"same": f"{number} of {node}"})
        first.settle()
        assert in_manifest(storage) == {"same": f"{number} of 0"}
    assert capsys.readouterr().out == "several nodes write same; those of the first node are kept\n"


def test_shadowed_file_appears_after_deletion(storage: RunStorage, start: Start) -> None:
    first = start(2)
    for node, each in enumerate(first.nodes):
        write(each.folder, {"same": str(node)})
    first.settle()
    write(first.nodes[1].folder, {"other": "1"})
    first.settle()
    (first.nodes[0].folder / "same").unlink()
    first.settle()
    assert in_manifest(storage) == {"same": "1", "other": "1"}
    publish(storage)
    assert contents(start(2).folder) == {"same": "1", "other": "1"}


def test_files_of_one_folder_stand_together() -> None:
    a, b = KeptFile("a"), KeptFile("b", node=1)
    others = dict.fromkeys(["x", "y", "d", "d/e", "x/z", "x/z/z", "d/y"], b)
    assert merge_parts([{"x": a, "d/e/x": a}, others]) == {"x": a, "d/e/x": a, "y": b, "d/y": b}


@ON_DISK
@pytest.mark.parametrize("late", [0, 1])
def test_node_without_a_pause_delays_all(storage: RunStorage, start: Start, late: int) -> None:
    first = start(2)
    write(first.nodes[1 - late].folder, {"ready": "1"})
    for number in range(10):
        write(first.nodes[late].folder, {f"shard{number}": "1"})
        first.poll(QUIET_SECONDS / 2)
    assert in_manifest(storage) == {}
    first.settle()
    assert len(in_manifest(storage)) == 11


class Writer:
    """A node that writes a file again and again while the driver polls and the nodes look at their folders.

    Args:
        nodes: The nodes.
        clock: Their clock.
        name: The name of the file on the last node.
        every: The seconds between two writes.
    """

    def __init__(self, nodes: Nodes, clock: Clock, name: str, every: float) -> None:
        self._nodes, self._clock = nodes, clock
        self._file = nodes.nodes[-1].folder / name
        self._every = every
        self._written_at = clock.now
        clock.sleep = self.sleep  # within a look, too

    def sleep(self, seconds: float) -> None:
        end = self._clock.now + seconds
        while self._written_at + self._every <= end:
            self._written_at += self._every
            self._file.write_text(str(self._written_at))
            nanoseconds = int(self._written_at * 1e9)
            os.utime(self._file, ns=(nanoseconds, nanoseconds))
        self._clock.now = end

    def run(self, seconds: float) -> None:
        end = self._clock.now + seconds
        while self._clock.now < end:
            for _ in range(2):
                self.sleep(0.25)
                for node in range(len(self._nodes.nodes)):
                    self._nodes.tell(node)
            for node in range(len(self._nodes.nodes)):
                self._nodes.look(node)


@ON_DISK
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("every", "open_share"),
    [(0.05, 0), (0.2, 0), (0.3, 0), (0.6, 0), (0.9, 0), (1.3, 0), (1.9, 0), (0.3, 0.4), (0.7, 0.5), (1.3, 0.5)],
)
def test_file_that_is_always_written_delays_no_snapshot(
    storage: RunStorage,
    start: Start,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    every: float,
    open_share: float,
) -> None:
    """The script holds the file open for a part of the time."""
    first = start(count)

    def open_files(folder: Path, *_: object) -> dict[str, bool]:
        is_open = folder == first.nodes[-1].folder and clock.now - writer._written_at < open_share * every
        return {"status.json": False} if is_open else {}

    monkeypatch.setattr(run_folder, "open_for_writing", open_files)
    for each in first.nodes:
        write(each.folder, {f"shard{each._node}": "1"})
    writer = Writer(first, clock, "status.json", every)
    writer.run(RESTLESS_SECONDS + 15)
    assert {f"shard{node}" for node in range(count)} <= in_manifest(storage).keys()
    for step in range(2, 5):
        for each in first.nodes:
            write(each.folder, {f"shard{each._node}": str(step)})
        writer.run(15)
        assert {in_manifest(storage)[f"shard{node}"] for node in range(count)} == {str(step)}


@ON_DISK
def test_file_of_a_short_pause_counts_at_its_moment(storage: RunStorage, start: Start, clock: Clock) -> None:
    """A file is there when a look finds a pause, and gone at the next look."""
    first = start(2)
    write(first.nodes[0].folder, {"step": "1"})
    second_folder = first.nodes[1].folder
    for number in range(int(OVERDUE_SECONDS / QUIET_SECONDS)):
        write(second_folder, {"busy": str(number)})
        first.poll(QUIET_SECONDS)
    write(second_folder, {"busy": "last"})

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if seconds == LOOK_SECONDS:
            write(second_folder, {"short": "1"})
            clock.sleep = Clock.sleep.__get__(clock)

    clock.sleep = sleep
    first.wait(QUIET_SECONDS)
    first.look(1)
    assert "short" in first.nodes[1].part.files
    for node in (1, 0, 1):
        first.tell(node)
    first.look(0)
    first.tell(0)
    write(first.nodes[0].folder, {"step": "2"})
    (second_folder / "short").unlink()
    for _ in range(2):
        first.wait(QUIET_SECONDS)
        first.look(1)
        first.tell(1)
        first.tell(0)
        first.look(0)
        assert in_manifest(storage) in ({}, {"step": "1", "busy": "last", "short": "1"})
    first.settle()
    assert in_manifest(storage) == {"step": "2", "busy": "last"}


SLOW = {
    "scans": (run_folder.FolderScanner, "scan", {}),
    "open files": (run_folder, "open_for_writing", {}),
    "processes": (node_files, "writers_of", []),
}


@ON_DISK
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("slow", SLOW)
def test_looks_take_a_small_share_of_the_time(
    start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch, slow: str, waits: bool
) -> None:
    first = start(2)
    folder, took = first.nodes[1], 0.0
    module, name, found = SLOW[slow]

    def look(*_: object) -> object:
        nonlocal took
        took += 0.5  # there are many
        clock.now += 0.5
        return found

    monkeypatch.setattr(module, name, look)
    first.files[1]._exchange.poll(1, Directive(scan=waits), -1, 0)
    began = clock.now
    folder.is_current = False
    while clock.now < began + 200:
        first.files[1]._look()
        folder.is_current = folder.is_current and slow != "open files"
        clock.now += POLL_SECONDS
    assert 5 < took < 200 / 20 + 1


@ON_DISK
def test_last_snapshot_waits_for_all_nodes(storage: RunStorage, start: Start) -> None:
    first = start(2)
    write(first.nodes[0].folder, {"shard0": "1"})
    write(first.nodes[1].folder, {"shard1": "1"})
    first.directive = Directive(ended=frozenset({0}))
    for node in range(2):
        first.tell(node)
        first.files[node].store_last()
    first.files[0].commit_last()
    assert in_manifest(storage) == {}
    first.end()
    assert in_manifest(storage) == {"shard0": "1", "shard1": "1"}


@ON_DISK
@pytest.mark.parametrize("directive", [Directive(ended=frozenset({0}), killed={0: None}), Directive()])
def test_last_files_need_the_word_of_the_driver(storage: RunStorage, start: Start, directive: Directive) -> None:
    """A script was killed; or the driver is lost, and the worker does not know how the others have ended."""
    first = start(1)
    write(first.folder, {"torn": "1"})
    first.directive = directive
    first.tell(0)
    first.files[0].store_last()
    assert in_manifest(storage) == {}
    assert first.exchanges[0].status.dropped == ("torn" if directive.killed else "")


def write_at(nodes: Nodes, clock: Clock, node: int, name: str, text: str) -> None:
    """Write a file at the time of the test's clock."""
    write(nodes.nodes[node].folder, {name: text})
    nanoseconds = int(clock.now * 1e9)
    os.utime(nodes.nodes[node].folder / name, ns=(nanoseconds, nanoseconds))


# Of each node, what happens after its folder was seen at rest: a file is written, in place or under a temporary name; a
# log grows; a link is switched; or nothing.
BEFORE_A_KILL: dict[tuple[tuple[str, ...], ...], bool] = {
    (("nothing",),): True,
    (("in place",),): False,
    (("temporary",),): False,
    (("log",),): True,
    (("link",),): True,
    (("log", "link"),): True,
    (("log", "in place"),): False,
    (("nothing",), ("nothing",)): True,
    (("nothing",), ("log",)): True,
    (("nothing",), ("in place",)): False,
    (("temporary",), ("nothing",)): False,
}


@ON_DISK
@pytest.mark.parametrize("who", ["its own look", "the worker's look before SIGTERM"])
@pytest.mark.parametrize("nodes", BEFORE_A_KILL)
def test_kill_at_rest_leaves_a_last_snapshot(
    storage: RunStorage,
    start: Start,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[tuple[str, ...], ...],
    who: str,
) -> None:
    """A script that saves every second is never quiet."""
    first = start(len(nodes))
    first.writers = (psutil.Process(),)
    monkeypatch.setattr(run_folder, "open_for_writing", lambda *_: {"train.log": True})
    for node in range(len(nodes)):
        write_at(first, clock, node, "train.log", "1")
    for step in range(4):
        for node in range(len(nodes)):
            write_at(first, clock, node, f"model{node}-{step}.pt", "1")
        first.wait(1.0)
        for node in range(len(nodes)):
            first.look(node)
    assert in_manifest(storage) == {}
    seen_at = clock.now
    if who != "its own look":  # which was some time ago
        for each in first.nodes:
            each.rested_at = seen_at - 3.0
    first.wait(0.1)
    for node, events in enumerate(nodes):
        for event in events:
            if event == "log":
                write_at(first, clock, node, "train.log", "12")
            elif event == "link":
                (first.nodes[node].folder / "last.ckpt").symlink_to(f"model{node}-3.pt")
            elif event != "nothing":
                write_at(first, clock, node, "model.pt" if event == "in place" else ".model.pt.part", "half")
    first.end(dict.fromkeys(range(len(nodes)), 0.0 if who == "its own look" else seen_at))
    names = {f"model{node}-{step}.pt" for node in range(len(nodes)) for step in range(4)}
    assert names <= in_manifest(storage).keys() or not BEFORE_A_KILL[nodes]
    assert BEFORE_A_KILL[nodes] or in_manifest(storage) == {}


@ON_DISK
def test_look_counts_only_if_the_script_outlives_it(
    storage: RunStorage, start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed closes its files before it has ended."""
    first = start(1)
    folder = first.nodes[0]
    with ScriptProcess(["sleep", "600"], ProcessOptions(os.environ, first.folder, print)) as script:
        first.writers = (psutil.Process(script.pid),)
        first.look(0)
        seen_at = folder.rested_at
        assert seen_at > 0

        def kill(seconds: float) -> None:
            script.kill()
            until(lambda: have_ended(first.writers), between=0.01)
            Clock.sleep(clock, seconds)

        monkeypatch.setattr(clock, "sleep", kill)
        first.wait(QUIET_SECONDS)
        first.look(0)
    assert folder.rested_at == seen_at
    monkeypatch.undo()


@ON_DISK
def test_open_file_is_not_at_rest(start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(1)
    folder = first.nodes[0]
    open_files: dict[str, bool] = {}
    monkeypatch.setattr(run_folder, "open_for_writing", lambda *_: open_files)
    write(first.folder, {"model.pt": "1"})
    cases = {"model.pt": False, "new.pt": False, "train.log": True, "__pycache__/a.pyc": False, "core.1": False}
    for name, is_appended in cases.items():
        open_files.clear()
        open_files[name] = is_appended
        assert folder.is_at_rest([]) == (name not in ("model.pt", "new.pt")), name


@ON_DISK
@pytest.mark.parametrize("ends", ["the script", "its supervisor"])
def test_files_of_an_ended_script_are_not_stored(storage: RunStorage, start: Start, tmp_path: Path, ends: str) -> None:
    """The driver may be slow to see that it was killed in the middle of a write."""
    first = start(1)
    write(first.folder, {"torn": "1"})
    with ScriptProcess(["sleep", "600"], ProcessOptions(os.environ, tmp_path, print)) as script:
        first.directive = Directive(pids={0: (script.pid,)})
        first.tell(0)
        [sleep] = until(lambda: psutil.Process(script.pid).children())
        os.kill(sleep.pid if ends == "the script" else script.pid, signal.SIGKILL)
        until(lambda: script.poll() is not None)
        for _ in range(3):
            first.wait(QUIET_SECONDS)
            first.files[0].store()
    assert in_manifest(storage) == {}


def test_unavailable_storage_is_reported_at_the_end(
    start: Start, storage: RunStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    is_away = False
    first = start(1, on=FaultyStorage.of(storage, lambda call: "before" if is_away else None))
    write(first.folder, {"a": "1"})
    is_away = True
    for seconds in (QUIET_SECONDS, 0.1, 0.1) * 3:  # some calls are too early for a look
        first.wait(seconds)
        first.files[0].store()
    assert first.exchanges[0].status.not_stored is None
    assert capsys.readouterr().out.count("the storage of files") == 1, "it has failed"
    is_away = False
    for seconds in (QUIET_SECONDS, 0.1) * 3:
        first.wait(seconds)
        first.files[0].store()
    assert capsys.readouterr().out.count("the storage of files works again") == 1
    write(first.folder, {"a": "2"})
    is_away = True
    with pytest.raises(Fault):  # of `not_stored`
        first.end()


def train(nodes: Nodes, step: int) -> None:
    """Do a step of a script on each node: a restart must find files of one step."""
    for node, each in enumerate(nodes.nodes):
        folder = each.folder
        write(folder, {f"in_place{node}": str(step), "new": str(step), f"ckpt-{step}/shard{node}": str(step)})
        (folder / "new").rename(folder / f"renamed{node}")
        for old in folder.glob(f"ckpt-*/shard{node}"):
            if old.parent.name != f"ckpt-{step}":
                old.unlink()
        if node == 0:
            (folder / "latest").unlink(missing_ok=True)
            (folder / "latest").symlink_to(f"ckpt-{step}")


def whole(step: int, count: int) -> dict[str, str]:
    """Return the files of the nodes after this step."""
    if step == 0:
        return {}
    names = [f"{kind}{node}" for kind in ("in_place", "renamed", f"ckpt-{step}/shard") for node in range(count)]
    return {**dict.fromkeys(names, str(step)), "latest": f"-> ckpt-{step}"}


def steps_of(storage: RunStorage) -> int:
    return int(in_manifest(storage).get("in_place0", "0"))


def attempt(nodes: Nodes, first: int) -> None:
    """Train three steps: one is stored while the script runs, one never, and one at its end."""
    train(nodes, first)
    nodes.settle()
    train(nodes, first + 1)
    nodes.poll(QUIET_SECONDS)
    train(nodes, first + 2)
    nodes.end()


def calls_of(storage: RunStorage, start: Start, count: int) -> int:
    """Return the number of calls of an attempt after another one."""
    attempt(start(count), 1)
    faulty = FaultyStorage.of(storage, lambda call: None)
    attempt(start(count, on=faulty), 4)
    assert in_manifest(storage) == whole(6, count)
    return faulty.calls


@NODES
@pytest.mark.parametrize("kind", ["before", "after"])
def test_crash_at_any_call_tears_no_snapshot(storage: RunStorage, start: Start, count: int, kind: str) -> None:
    calls = calls_of(storage, start, count)
    lock = threading.Lock()
    step = 6
    # A crash after a call is one before the next call.
    for crash in range(1, calls + 1, 2 if storage.is_local else calls // 4):
        is_down = False

        def fails(call: int, crash: int = crash) -> str | None:
            nonlocal is_down
            with lock:
                fate = "before" if is_down else kind if call >= crash else None
                is_down = is_down or call >= crash
            return fate

        with suppress(OSError):  # the last calls only clean up
            attempt(start(count, on=FaultyStorage.of(storage, fails)), step + 1)
        found = steps_of(storage)
        assert step <= found <= step + 3
        step = found
        for node in start(count).nodes:
            assert contents(node.folder) == whole(step, count)


@NODES
@pytest.mark.parametrize("kind", ["before", "after"])
def test_failed_call_tears_no_snapshot(storage: RunStorage, start: Start, count: int, kind: str) -> None:
    calls = calls_of(storage, start, count)
    step = 6
    first = 1 if kind == "before" else 2
    for failing in range(first, calls + 1, 2 if storage.is_local else calls // 2):
        faulty = FaultyStorage.of(storage, lambda call: None)
        nodes = start(count, on=faulty)
        object.__setattr__(faulty, "calls", 0)
        object.__setattr__(faulty, "fails", lambda call, failing=failing: kind if call == failing else None)
        for _ in range(2):
            step += 1
            train(nodes, step)
            for _ in range(8):
                try:
                    nodes.poll(QUIET_SECONDS)
                except OSError:
                    steps = steps_of(storage)
                    assert in_manifest(storage) == whole(steps, count)
            assert in_manifest(storage) == whole(step, count)
        if failing % 3 == 1:  # the next attempt has all files
            assert contents(start(count).folder) == whole(step, count)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_interrupted_publish_is_completed(storage: RunStorage, start: Start, kind: str) -> None:
    first = start(2)
    train(first, 1)
    first.settle()
    train(first, 2)
    first.end()
    manifest = read_snapshot(storage)
    assert any(key.startswith("versions/") for key in manifest.keys)
    for failing in range(1, 200, 1 if storage.is_local else 13):
        faulty = FaultyStorage.of(storage, lambda call, failing=failing: kind if call == failing else None)
        storage.write("versions/0-1-old/left", "1")
        storage.write("parts/1-1.json", "1")
        try:
            publish(faulty)
        except OSError:
            assert in_manifest(storage) == whole(2, 2)
        if faulty.calls < failing:
            break
        publish(storage)
        assert {name: storage.read(f"files/{name}") for name in storage.files("files")} == {
            name: text.encode() for name, text in whole(2, 2).items() if name != "latest"
        }
        assert storage.files("versions") == storage.files("parts") == {}
        # The earlier state, for the next fault.
        for name, kept in read_snapshot(storage).files.items():
            if (was := manifest.files[name]).key.startswith("versions/"):
                storage.write(was.key, storage.read(kept.key))
                storage.delete(kept.key)
        storage.write("files/left", "1")
        write_snapshot(storage, manifest)
    assert failing > 5
