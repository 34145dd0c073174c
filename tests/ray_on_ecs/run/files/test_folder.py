"""The folder of a run on one node: stored files, the time of storage, and resets."""

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.errors import DISK_FULL
from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import frozen
from ray_on_ecs.run.files import scan as folder_scan
from ray_on_ecs.run.files.folder import LOG_SECONDS, OVERDUE_SECONDS, QUIET_SECONDS
from ray_on_ecs.run.files.scan import OPEN_SECONDS, PAUSE_SECONDS, RESTLESS_SECONDS, SLOW_BYTES, SLOW_SECONDS
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import publish, read_snapshot, write_snapshot
from tests.run_folders import Clock, Fault, FaultyStorage, Nodes, Start, contents, in_manifest, make_folder, write

ON_DISK = pytest.mark.parametrize("storage", ["disk"], indirect=True)
CODE = {"train.py": "code", "lib/a.py": "a", "link": "-> train.py", "folder": "-> lib"}
NAMES = [
    "epoch=3-val_loss=0.25.ckpt",
    "a b.txt",
    "100%.txt",
    "x%20y.txt",
    "%E9",
    os.fsdecode(b"\xe9"),
    "c++.txt",
    "what?.txt",
    "#1.txt",
    "grüße-µ.txt",
    "q'uote\".txt",
    "[1].txt",
    "~t.txt",
    "a&b;c,d@e:f$g!.txt",
    ".hidden",
    "back\\slash.txt",
    "dir with space/in it.txt",
    "トレーニング/モデル.pt",
    "new\nline.txt",
    "carriage\rreturn",
    "bell\x07",
    os.fsdecode(b"r\xe9sultats/r\xe9.txt"),
    "packed.gz",
    "model.pt",
    "model.pt.part",
]


@pytest.fixture
def me() -> tuple[psutil.Process, ...]:
    return (psutil.Process(),)


def test_new_files_and_changed_code_are_restored(storage: RunStorage, start: Start) -> None:
    first = start(code=CODE)
    assert contents(first.folder) == CODE
    write(first.folder, {"lib/a.py": "changed", "out/model.pt": "1"})
    (first.folder / "run.sh").write_text("run")
    (first.folder / "run.sh").chmod(0o755)
    os.utime(first.folder / "run.sh", ns=(10**18, 10**18 + 1))
    links = {"absolute": "/tmp", "out/up": "../lib", "dangling": "nowhere"}
    for name, target in links.items():
        (first.folder / name).symlink_to(target)
    first.settle()
    shown = {name: f"-> {target}" for name, target in links.items()}
    assert in_manifest(storage) == {"lib/a.py": "changed", "out/model.pt": "1", "run.sh": "run", **shown}
    second = start(code=CODE)
    assert contents(second.folder) == {**CODE, **in_manifest(storage)}
    restored = os.stat(second.folder / "run.sh")
    assert (restored.st_mode & 0o777, restored.st_mtime_ns) == (0o755, 10**18 + 1)


def test_odd_names_and_times_do_not_keep_a_run_from_resuming(
    storage: RunStorage, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start()
    kept = {"a": "1", "x" * 255: "2", ".gitignore": "3"}
    write(first.folder, {**kept, "sub/.git": "gitdir: ..", "repo/.GIT/config": "[core]", "git~1": "4"})
    os.utime(first.folder / "a", ns=(-(10**18), -(10**18)))
    first.settle()
    assert in_manifest(storage) == kept
    snapshot = read_snapshot(storage)
    write_snapshot(storage, replace(snapshot, files={**snapshot.files, "../b": snapshot.files["a"]}))
    second = start()
    assert contents(second.folder) == kept
    assert os.stat(second.folder / "a").st_mtime_ns == -(10**18)
    assert "not restored, as they can't be files here: '../b'" in capsys.readouterr().out
    write(second.folder, {"c": "5"})
    second.settle()
    second.end()
    publish(storage)
    assert contents(start().folder) == {**kept, "c": "5"}


def test_restored_files_are_not_stored_again(storage: RunStorage, start: Start) -> None:
    first = start()
    write(first.folder, {"a": "1"})
    first.settle()
    before = read_snapshot(storage)
    second = start()
    second.settle()
    second.end()
    assert second.nodes[0].part.number == 0
    assert read_snapshot(storage) == before


def test_unusual_names_are_restored_and_published(storage: RunStorage, start: Start) -> None:
    first = start()
    write(first.folder, {name: name.encode(errors="surrogateescape") for name in NAMES})
    (first.folder / os.fsdecode(b"l\xe9")).symlink_to(os.fsdecode(b"\xe9"))
    first.settle()
    assert first.nodes[0].failed == {}
    for _ in range(2):
        second = start()
        found = {n: (second.folder / n).read_bytes() for n in NAMES}
        assert found == {name: name.encode(errors="surrogateescape") for name in NAMES}
        assert os.readlink(second.folder / os.fsdecode(b"l\xe9")) == os.fsdecode(b"\xe9")
        publish(storage)
    assert len(storage.files("files")) == len(NAMES)
    assert storage.read("files/grüße-µ.txt").decode() == "grüße-µ.txt"


@ON_DISK
def test_part_waits_until_files_are_quiet(storage: RunStorage, start: Start) -> None:
    first = start()
    for content in "123":
        write(first.folder, {"a": content})
        first.poll(QUIET_SECONDS - 0.1)
    assert first.nodes[0].part.number == 0
    first.poll(QUIET_SECONDS)
    assert in_manifest(storage) == {"a": "3"}


@ON_DISK
def test_open_file_delays_a_part(storage: RunStorage, start: Start, me: tuple[psutil.Process, ...]) -> None:
    first = start()
    first.writers = me
    write(first.folder, {"a": "1"})
    with (first.folder / "b").open("w") as file:
        file.write("2")
        file.flush()
        first.settle()
        assert in_manifest(storage) == {}
    first.settle()
    assert in_manifest(storage) == {"a": "1", "b": "2"}


def test_log_delays_no_snapshot(storage: RunStorage, start: Start, me: tuple[psutil.Process, ...]) -> None:
    first = start()
    first.writers = me
    write(first.folder, {"model.pt": "1"})
    names = ("appended", "train.log", "run-1.wandb", "metrics.csv", "tb/events.out.tfevents.1.host")
    (first.folder / "tb").mkdir()
    files = [(first.folder / name).open("a" if name == "appended" else "w") for name in names]
    for number in "01":
        for file in files:
            print(number, file=file, flush=True)
        first.poll(PAUSE_SECONDS)
    first.settle()
    assert in_manifest(storage) == {"model.pt": "1", **dict.fromkeys(names, "0\n1\n")}
    manifest = read_snapshot(storage).files
    assert {name for name, kept in manifest.items() if kept.is_log} == set(names)
    for file in files:
        print("2", file=file, flush=True)
    first.poll()
    assert in_manifest(storage) == {"model.pt": "1", **dict.fromkeys(names, "0\n1\n")}
    first.poll(LOG_SECONDS)
    assert in_manifest(storage) == {"model.pt": "1", **dict.fromkeys(names, "0\n1\n2\n")}
    second = start()
    assert contents(second.folder) == {"model.pt": "1", **dict.fromkeys(names, "0\n1\n2\n")}
    for file in files:
        print("3", file=file, flush=True)
        file.close()
    first.end()
    assert in_manifest(storage) == {"model.pt": "1", **dict.fromkeys(names, "0\n1\n2\n3\n")}
    assert not any(kept.is_log for kept in read_snapshot(storage).files.values())


@pytest.mark.parametrize("is_renamed", [False, True])
def test_status_file_becomes_a_log(
    storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    monkeypatch.setattr(run_folder, "OVERDUE_SECONDS", 2 * RESTLESS_SECONDS)
    first = start()

    def step(number: int) -> None:
        write(first.folder, {"status.tmp" if is_renamed else "status.json": str(number)})
        if is_renamed:
            (first.folder / "status.tmp").rename(first.folder / "status.json")
        first.poll(QUIET_SECONDS)

    write(first.folder, {"model.pt": "1"})
    polls = int(RESTLESS_SECONDS / QUIET_SECONDS)
    for number in range(polls):
        step(number)
    assert in_manifest(storage) == {}
    for number in range(4):
        step(polls + number)
    assert in_manifest(storage).keys() == {"model.pt", "status.json"}
    assert read_snapshot(storage).files["status.json"].is_log
    first.settle()
    assert in_manifest(storage)["status.json"] == str(polls + 3)


@ON_DISK
@pytest.mark.parametrize(
    ("growth", "seconds"),
    [(None, SLOW_SECONDS), (1, SLOW_SECONDS), (SLOW_BYTES, OPEN_SECONDS), (0, OPEN_SECONDS), (-1, OPEN_SECONDS)],
    ids=["idle", "slow", "fast", "allocated before", "shorter"],
)
def test_file_held_open_becomes_a_log(
    storage: RunStorage, start: Start, me: tuple[psutil.Process, ...], growth: int | None, seconds: float
) -> None:
    """One that grows fast, or is written without growing, may be a checkpoint for some minutes."""
    first = start()
    first.writers = me
    write(first.folder, {"model.pt": "1"})
    with (first.folder / "data.h5").open("wb") as file:
        polls = int(seconds / SLOW_SECONDS)
        for number in range(polls + 3):
            assert number > polls or in_manifest(storage) == {}, number
            if growth is not None:
                file.truncate(1000 + number * growth)
                os.utime(file.fileno(), ns=(number, number))  # the disk's clock may be slower
            first.poll(SLOW_SECONDS)
        assert read_snapshot(storage).files.keys() == {"model.pt", "data.h5"}


@ON_DISK
def test_pause_after_a_kill_is_ignored(storage: RunStorage, start: Start) -> None:
    first = start()
    with subprocess.Popen(["sleep", "60"]) as script:
        first.writers = (psutil.Process(script.pid),)
        script.kill()
        script.wait()
        for number in range(2 * int(OVERDUE_SECONDS / QUIET_SECONDS)):
            write(first.folder, {"checkpoint": str(number)})
            first.poll(QUIET_SECONDS)
    assert in_manifest(storage) == {}


@ON_DISK
def test_script_without_pauses_is_stored(storage: RunStorage, start: Start) -> None:
    first = start()
    polls = int(OVERDUE_SECONDS / QUIET_SECONDS)
    for number in range(polls + 2):
        assert number > polls - 2 or in_manifest(storage) == {}, number
        write(first.folder, {f"checkpoint-{number}": "1", "newest": str(number)})
        first.poll(QUIET_SECONDS)
    newest = in_manifest(storage)["newest"]
    assert f"checkpoint-{newest}" in in_manifest(storage)


@ON_DISK
@pytest.mark.parametrize(
    ("size", "is_renamed", "is_stored"),
    [(1, False, True), (100_000, False, False), (100_000, True, True)],
    ids=["small", "large", "large and renamed"],
)
def test_file_may_change_during_upload(
    storage: RunStorage,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    is_renamed: bool,
    is_stored: bool,
) -> None:
    first = start()
    original = first.nodes[0]._upload_all

    def upload_all(*args: object) -> object:
        write(first.folder, {"new" if is_renamed else "state": "2" * size})
        if is_renamed:
            (first.folder / "new").rename(first.folder / "state")
        return original(*args)  # ty: ignore[invalid-argument-type]

    monkeypatch.setattr(first.nodes[0], "_upload_all", upload_all)
    before = {"state": "1" * size, "model.pt": "1" * 100_000}
    write(first.folder, before)
    first.settle(2)
    assert in_manifest(storage) == (before if is_stored else {})


def test_one_bad_file_is_named(storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    original = run_folder.RunFolder._upload

    def upload(folder: run_folder.RunFolder, name: str, *args: object) -> object:
        if name == "bad":
            raise PermissionError("may not be read")
        return original(folder, name, *args)  # ty: ignore[invalid-argument-type]

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "_upload", upload)
        write(first.folder, {"bad": "1", "good": "1"})
        first.settle()
        assert in_manifest(storage) == {"good": "1"}
        assert first.nodes[0].failed == {"bad": "may not be read"}
        number = first.nodes[0].part.number
        first.settle()
        assert first.nodes[0].part.number == number
    first.end()
    assert in_manifest(storage) == {"bad": "1", "good": "1"}
    assert first.nodes[0].failed == {}


@pytest.mark.parametrize("number", DISK_FULL)
def test_full_disk_stores_all_files_or_none(
    storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A small tracker has room where its checkpoint has none."""
    first = start()
    write(first.folder, {"model_0": "0" * 10, "tracker": "0"})
    first.settle()
    before = in_manifest(storage)
    original = run_folder.RunFolder._upload

    def upload(folder: run_folder.RunFolder, name: str, *args: object) -> object:
        if name == "model_1":
            raise OSError(number, os.strerror(number))
        return original(folder, name, *args)  # ty: ignore[invalid-argument-type]

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "_upload", upload)
        (first.folder / "model_0").unlink()
        write(first.folder, {"model_1": "1" * 10, "tracker": "1"})
        with pytest.raises(OSError, match=os.strerror(number)):
            first.settle()
        with pytest.raises(OSError, match=r"the disk of .* is full"):
            first.end()
        assert in_manifest(storage) == before
    first.exchanges[0].report(not_stored=None)
    first.end()
    assert in_manifest(storage) == {"model_1": "1" * 10, "tracker": "1"}


def test_last_files_in_place_need_no_space(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are links: the script has ended, and the next one gets copies."""
    storage = RunStorage.open(str(tmp_path / "storage"), "mine")
    first = direct(tmp_path, clock, CODE)
    write(first.folder, {"model.pt": "1", "large.pt": "1" * 100_000})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(frozen, "copy_bytes", fail)
        patch.setattr(run_folder, "copy_bytes", fail)
        first.end()
    second = direct(tmp_path, clock, CODE)
    write(second.folder, {"model.pt": "half"})
    assert contents(direct(tmp_path, clock, CODE).folder) == {**CODE, "model.pt": "1", "large.pt": "1" * 100_000}
    direct(tmp_path, clock, CODE)
    publish(storage)
    assert contents(tmp_path / "storage" / "mine" / "files" / "code")["model.pt"] == "1"


def test_unavailable_storage_is_retried(storage: RunStorage, start: Start) -> None:
    is_away = False
    first = start(on=FaultyStorage.of(storage, lambda call: "before" if is_away else None))
    write(first.folder, {"a": "1"})
    first.poll()
    is_away = True
    for _ in range(2):
        with pytest.raises(Fault):
            first.poll(QUIET_SECONDS)
        assert not first.nodes[0].is_current
    is_away = False
    first.settle()
    assert in_manifest(storage) == {"a": "1"}
    assert first.nodes[0].failed == {}


def test_manifest_object_stays_until_the_next(storage: RunStorage, start: Start) -> None:
    first = start()
    write(first.folder, {"a": "1"})
    first.settle()
    [key] = read_snapshot(storage).keys
    for content in "23":  # stored twice, and not committed
        write(first.folder, {"a": content})
        for _ in range(2):
            first._clock.now += QUIET_SECONDS
            first.nodes[0].poll()
        assert first.nodes[0].is_current
        assert in_manifest(storage) == {"a": "1"}
    first.settle()
    assert in_manifest(storage) == {"a": "3"}
    assert not storage.exists(key)
    assert len(storage.files("files")) + len(storage.files("versions")) == 1


def test_deleted_file_is_missing_from_next_snapshot(storage: RunStorage, start: Start) -> None:
    first = start(code=CODE)
    write(first.folder, {"old/a": "1", "b": "1", "train.py": "changed"})
    first.settle()
    for name in ("old/a", "train.py"):
        (first.folder / name).unlink()
    first.settle()
    assert in_manifest(storage) == {"b": "1"}
    assert contents(start(code=CODE).folder) == {**CODE, "b": "1"}


@pytest.mark.parametrize("name", ["a", "train.py", "link", "folder"])
def test_file_and_folder_replace_each_other(storage: RunStorage, start: Start, name: str) -> None:
    first = start(code=CODE)
    if name == "a":
        write(first.folder, {"a": "1"})
        first.settle()
    (first.folder / name).unlink()
    write(first.folder, {f"{name}/b": "2"})
    first.settle()
    publish(storage)
    assert first.nodes[0].failed == {}
    second = start(code=CODE)
    assert contents(second.folder) == {**{n: text for n, text in CODE.items() if n != name}, f"{name}/b": "2"}
    (second.folder / name / "b").unlink()
    (second.folder / name).rmdir()
    write(second.folder, {name: "3"})
    second.settle()
    publish(storage)
    assert second.nodes[0].failed == {}
    assert contents(start(code=CODE).folder) == {**CODE, name: "3"}
    assert storage.files("files").keys() == {name}


@ON_DISK
def test_files_over_a_limit_are_named(storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "MAX_ENTRIES", 3)
    first = start(max_bytes=100)
    write(first.folder, {"data/large": "1" * 101, "model.pt": "1", **{f"many/{n}": "1" for n in range(4)}})
    first.settle()
    assert in_manifest(storage) == {"model.pt": "1"}
    left_out = ("many/ (more than 10,000 entries)", "data/ (1 file, 0.0 GiB)")
    assert read_snapshot(storage).left_out == left_out
    assert first.nodes[0].part.number == 1
    (first.folder / "model.pt").unlink()
    write(first.folder, {"data/large": "1"})
    first.settle()
    assert in_manifest(storage) == {"data/large": "1"}


@ON_DISK
def test_files_within_the_limit_again_are_stored(
    storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MAX_FILES", 3)
    first = start()
    write(first.folder, {"a/1": "1", "a/2": "1", "b": "1", "c": "1"})
    first.settle()
    assert in_manifest(storage) == {"b": "1", "c": "1"}
    (first.folder / "b").unlink()
    first.settle()
    assert in_manifest(storage) == {"a/1": "1", "a/2": "1", "c": "1"}


@ON_DISK
def test_oversized_folder_is_restored(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    write(first.folder, {f"many/{n}": "1" for n in range(4)})
    first.settle()
    monkeypatch.setattr(folder_scan, "MAX_ENTRIES", 3)
    for _ in range(2):
        first.restart()
        assert contents(first.folder) == {f"many/{n}": "1" for n in range(4)}


def test_surviving_node_fetches_changed_files(
    storage: RunStorage, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    write(first.folder, {"a": "1", "b": "1", "c": "1", "d/e": "1", "link": "x"})
    first.settle()
    write(first.folder, {"a": "half", "new": "1"})
    (first.folder / "b").unlink()
    (first.folder / "new2").write_text("1")
    (first.folder / "new2").rename(first.folder / "c")
    kind = type(storage.store)
    read = kind.read
    paths: list[str] = []

    def counting(self: Any, path: str, *piece: Any) -> bytes:
        paths.append(path.rpartition("/")[2])
        return read(self, path, *piece)

    monkeypatch.setattr(kind, "read", counting)
    first.restart()
    assert contents(first.folder) == {"a": "1", "b": "1", "c": "1", "d/e": "1", "link": "x"}
    assert sorted(paths) == ["a", "b", "c", "files.json"]
    paths.clear()
    first.restart()
    assert paths == ["files.json"]


def direct(tmp_path: Path, clock: Clock, code: dict[str, str] | None = None) -> Nodes:
    storage = RunStorage.open(str(tmp_path / "storage"), "mine")
    return Nodes(storage, tmp_path / "unused", clock, code=code, is_direct=True)


def test_single_machine_works_in_place(tmp_path: Path, clock: Clock) -> None:
    storage = RunStorage.open(str(tmp_path / "storage"), "mine")
    first = direct(tmp_path, clock, CODE)
    assert first.folder == tmp_path / "storage" / "mine" / "files" / "code"
    write(first.folder, {"a": "1", "b": "1"})
    first.settle()
    assert {kept.key.partition("/")[0] for kept in read_snapshot(storage).files.values()} == {"versions"}
    write(first.folder, {"a": "half"})
    second = direct(tmp_path, clock, CODE)
    assert contents(second.folder) == {**CODE, "a": "1", "b": "1"}
    write(second.folder, {"a": "2"})
    second.end()
    publish(storage)
    assert contents(tmp_path / "storage" / "mine" / "files") == {
        f"code/{name}": text for name, text in {**CODE, "a": "2", "b": "1"}.items()
    }
    assert not (tmp_path / "storage" / "mine" / "versions").exists()


@pytest.mark.parametrize("starts", [1, 2, 3])
def test_last_files_of_a_start_in_place_are_not_written_by_the_next(tmp_path: Path, clock: Clock, starts: int) -> None:
    first = direct(tmp_path, clock, CODE)
    for start in range(starts):
        write(first.folder, {"a": f"{start}", "d/b": f"{start}"})
        first.end()
        first.restart()
    write(first.folder, {"a": "half", "d/b": ""})
    assert contents(direct(tmp_path, clock, CODE).folder) == {**CODE, "a": f"{starts - 1}", "d/b": f"{starts - 1}"}


def test_published_run_in_place_can_continue(tmp_path: Path, clock: Clock) -> None:
    storage = RunStorage.open(str(tmp_path / "storage"), "mine")
    first = direct(tmp_path, clock, CODE)
    write(first.folder, {"a": "1", "d/b": "1", "deleted": "1", "edited": "1"})
    first.end()
    publish(storage)
    (first.folder / "deleted").unlink()
    (first.folder / "edited").write_text("longer")
    for _ in range(2):
        second = direct(tmp_path, clock, CODE)
        assert contents(second.folder) == {**CODE, "a": "1", "d/b": "1", "edited": "longer"}
    write(second.folder, {"a": "in place"})
    assert contents(direct(tmp_path, clock, CODE).folder)["a"] == "1"


def test_original_files_behind_links_stay(tmp_path: Path, clock: Clock) -> None:
    storage = RunStorage.open(str(tmp_path / "storage"), "mine")
    write(tmp_path / "project", {"data/a": "1", "b": "1"})
    code = {"data": f"-> {tmp_path}/project/data", "b": f"-> {tmp_path}/project/b"}
    write(direct(tmp_path, clock, code).folder, {"partial": "1"})
    publish(storage)  # before the first snapshot
    assert (tmp_path / "storage" / "mine" / "files" / "code" / "partial").exists()
    direct(tmp_path, clock, code)
    Nodes(storage, tmp_path / "nodes", clock, 2).end()  # on other nodes
    publish(storage)
    assert contents(tmp_path / "project") == {"data/a": "1", "b": "1"}


def test_interrupted_reset_can_be_repeated(storage: RunStorage, start: Start, tmp_path: Path) -> None:
    first = start()
    write(first.folder, {"a": "1", "b": "2", "link": "3"})
    first.settle()
    calls = 0

    def fails(call: int) -> str | None:
        return "before" if call == calls else None

    faulty = FaultyStorage.of(storage, fails)
    folder = make_folder(faulty, tmp_path / "faulty")
    for index in range(1, 30):
        calls = faulty.calls + index
        try:
            folder.reset()
        except OSError:
            continue
        break
    assert contents(folder.folder) == {"a": "1", "b": "2", "link": "3"}
