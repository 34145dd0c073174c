"""The manifest of a snapshot, the keys of its files, and their places."""

import json
import os
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any, Self

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import (
    KeptFile,
    Snapshot,
    delete_others,
    key_of,
    publish,
    read_snapshot,
    restore,
    write_snapshot,
)
from tests.run_folders import contents, write


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "storage"), "mine")


def test_a_manifest_is_read_as_written(storage: RunStorage) -> None:
    files = {
        "a": KeptFile("files/a", 1, 2, 0o755),
        os.fsdecode(b"\xe9\n"): KeptFile("versions/1-2-x/b", is_log=True, node=1),
        "link": KeptFile(link=os.fsdecode(b"\xe9")),
    }
    snapshot = Snapshot(files, ("data/ (1 file)",), "files/code")
    assert read_snapshot(storage) == Snapshot()
    write_snapshot(storage, snapshot)
    assert read_snapshot(storage) == snapshot
    assert snapshot.keys == {"files/a", "versions/1-2-x/b"}


@pytest.mark.parametrize(
    "text", ["{", "", "\xff", "[" * 100_000, '{"files": ' * 50_000, '{"files": 1' + "0" * 9999 + "}"]
)
def test_a_broken_manifest_is_named(storage: RunStorage, text: str) -> None:
    storage.write(layout.FILES, text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"files\.json .*is broken"):
        read_snapshot(storage)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (b"a b/c", "files/a b/c"),
        ("é".encode(), "files/é"),
        (b"\xe9", "files/%E9"),
        (b"%E9", "files/%25E9"),
        (b"100%.txt", "files/100%.txt"),
        (b"a\nb\r\x7f", "files/a%0Ab%0D%7F"),
    ],
)
def test_keys_are_readable(name: bytes, key: str) -> None:
    assert key_of("files", os.fsdecode(name)) == key


def kept(storage: RunStorage, key: str, text: str, **values: Any) -> KeptFile:
    storage.write(key, text)
    return KeptFile(key, len(text), 10**18, **values)


BEFORE = {"file": {"a": "old"}, "folder": {"a/b/c": "old"}, "link": {"a": "-> /"}, "nothing": {}}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("is_link", [False, True])
def test_restore_makes_room(storage: RunStorage, tmp_path: Path, before: str, name: str, is_link: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for old, text in BEFORE[before].items():
        if text == "old":
            write(folder, {old: text})
        else:
            (folder / old).symlink_to(text[3:])
    restore(storage, {name: KeptFile(link="x") if is_link else kept(storage, "files/1", "new")}, folder)
    assert contents(folder)[name] == ("-> x" if is_link else "new")


def test_a_log_is_restored_as_it_was(storage: RunStorage, tmp_path: Path) -> None:
    log = kept(storage, "files/log", "1", is_log=True)
    storage.write("files/log", "1 and more")
    restore(storage, {"log": log}, tmp_path / "folder")
    assert contents(tmp_path / "folder") == {"log": "1"}


def test_published_files_are_in_their_places(storage: RunStorage) -> None:
    files = {
        "a": kept(storage, "versions/0-2-x/a", "new"),
        "b": kept(storage, "files/b", "1"),
        "c/d": kept(storage, "versions/0-1-x/c/d", "1"),
        "e": kept(storage, "versions/0-1-x/e", "1", mode=0o755),
        "link": KeptFile(link="a"),
    }
    write(Path(storage.path("files")), {"a": "old", "c": "a file", "e/f": "a folder", "gone": "1"})
    storage.write("parts/1-1.json", "{}")
    write_snapshot(storage, Snapshot(files))
    for _ in range(2):
        publish(storage)
        assert contents(Path(storage.path())).keys() == {"files.json", "files/a", "files/b", "files/c/d", "files/e"}
        assert contents(Path(storage.path("files"))) == {"a": "new", "b": "1", "c/d": "1", "e": "1"}
        assert read_snapshot(storage).keys == {"files/a", "files/b", "files/c/d", "files/e"}
    assert not Path(storage.path("versions")).exists()


def test_what_links_lead_to_is_not_deleted(storage: RunStorage, tmp_path: Path) -> None:
    write(tmp_path / "project", {"data/a": "1"})
    write(Path(storage.path("files")), {"code/old": "1"})
    Path(storage.path("files/code/data")).symlink_to(tmp_path / "project" / "data")
    delete_others(storage, Snapshot())
    assert contents(tmp_path / "project") == {"data/a": "1"}
    assert not storage.exists("files/code/old")


GOOD: dict[str, Any] = {"key": "files/a", "size": 3, "written_at": 1}
ODD: dict[str, Any] = {
    "a key that leads out": {**GOOD, "key": "files/../../secret"},
    "a key of another folder": {**GOOD, "key": "checkpoints/a"},
    "an absolute key": {**GOOD, "key": "/etc/passwd"},
    "a key beside the folder": {**GOOD, "key": "files-of-another/a"},
    "no key": {"size": 3},
    "a key that is a list": {**GOOD, "key": ["files/a"]},
    "a negative size": {**GOOD, "size": -1},
    "a size that is text": {**GOOD, "size": "3"},
    "a fraction": {**GOOD, "size": 0.5},
    "a huge time": {**GOOD, "written_at": 2**70},
    "a huge time before 1970": {**GOOD, "written_at": -(2**70)},
    "infinity": {**GOOD, "written_at": float("inf")},
    "a time that is true": {**GOOD, "written_at": True},
    "a negative mode": {**GOOD, "mode": -1},
    "an empty part in a key": {**GOOD, "key": "files//a"},
    "a key that ends with a slash": {**GOOD, "key": "files/a/"},
    "a key with NUL": {**GOOD, "key": "files/a\0"},
    "a key with half of a character": {**GOOD, "key": "files/\ud800"},
    "a mode that is text": {**GOOD, "mode": "777"},
    "a mode that is true": {**GOOD, "mode": True},
    "a link with NUL": {"link": "b\0c"},
    "a link with half of a character": {"link": "\ud800"},
    "a link that is a number": {"link": 3},
    "a link with a key": {**GOOD, "link": "b"},
    "a log that is a number": {**GOOD, "is_log": 7},
    "a file that is a list": [1],
    "an empty link": {"link": ""},
    "a link that is too long": {"link": "x/" * 2048},
    "a link whose bytes are too many": {"link": "\u00fc" * 2048},
    "a link that is a list": {"link": ["b"]},
    "a link that is false": {"link": False},
    "a key that is the top": {**GOOD, "key": "files"},
    "a key that is null": {**GOOD, "key": None},
    "a key that is a folder": {**GOOD, "key": "files/folder"},
    "a key that is a linked folder": {**GOOD, "key": "files/linked"},
    "a key that is a socket": {**GOOD, "key": "files/pipe"},
    "null": None,
    "text": "key",
    "an empty entry": {},
}
BROKEN: dict[str, Any] = {
    "files that are a list": {"files": ["a"]},
    "files that are missing": {"files": None},
    "a folder that leads out": {"files": {}, "folder": "../other"},
    "a folder that leads out at last": {"files": {}, "folder": "files/../.."},
    "another folder": {"files": {}, "folder": "checkpoints"},
    "a folder that is a number": {"files": {}, "folder": 7},
}


def write_document(storage: RunStorage, **changed: Any) -> None:
    storage.write("files.json", json.dumps({"format": 1, "folder": "files", "left_out": [], **changed}))


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_manifest_is_one_line(storage: RunStorage, kind: str) -> None:
    write_document(storage, **BROKEN[kind])
    with pytest.raises(UsageError, match=r"/mine/files\.json is broken \(.*\); use another run name"):
        read_snapshot(storage)


@pytest.mark.parametrize("kind", ODD)
def test_odd_entry_counts_as_absent(storage: RunStorage, tmp_path: Path, kind: str) -> None:
    storage.write("files/folder/x", "1")
    storage.write("files/good", "abc")
    Path(storage.path("files/linked")).symlink_to("folder")
    os.mkfifo(storage.path("files/pipe"))
    good = {"b": {**GOOD, "key": "files/good"}, "link": {"link": "y" * 4095}}
    write_document(storage, files={"a": ODD[kind], **good})
    snapshot = read_snapshot(storage)
    assert (snapshot.files.keys(), snapshot.refused) == ({"b", "link"}, ("a",))
    assert restore(storage, snapshot.files, tmp_path / "here") == []
    assert publish(storage).files.keys() == {"b", "link"}


@pytest.mark.parametrize("changed", [{"left_out": 7}, {"left_out": None}, {"files": {"a": {**GOOD, "later": 1}}}])
def test_other_fields_are_not_read(storage: RunStorage, changed: dict[str, Any]) -> None:
    write_document(storage, **{"files": {"a": GOOD}, **changed})
    assert read_snapshot(storage) == Snapshot({"a": KeptFile("files/a", 3, 1)})


@pytest.mark.parametrize("key", ["files/" + "x" * 300, "files/" + "d/" * 3000 + "x", "files/a/b", "files/absent"])
def test_impossible_object_is_missing(storage: RunStorage, tmp_path: Path, key: str) -> None:
    storage.write("files/a", "1")
    write_document(storage, files={"b": {**GOOD, "key": key}})
    with pytest.raises(FileNotFoundError, match="is missing"):
        restore(storage, read_snapshot(storage).files, tmp_path / "here")


def test_size_of_the_storage_counts(storage: RunStorage, tmp_path: Path) -> None:
    storage.write("files/a", "abc")
    with pytest.raises(OSError, match="has 3 of 1,000,000,000,000,000 bytes"):
        restore(storage, {"a": KeptFile("files/a", 10**15)}, tmp_path / "here")
    restore(storage, {"a": KeptFile("files/a", 3, mode=0o600)}, tmp_path / "here")
    assert (tmp_path / "here" / "a").read_text() == "abc"


def test_special_modes_are_dropped(storage: RunStorage) -> None:
    storage.write("files/a", "abc")
    write_snapshot(storage, Snapshot({"a": KeptFile("files/a", 3, mode=0o4755)}))
    assert read_snapshot(storage).files["a"].mode == 0o755


WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {  # by a script on Linux
    "a name of 255 bytes": ("x" * 255, {}),
    "bytes that are not UTF-8": (os.fsdecode(b"\xe9" * 255), {}),
    "control characters": ("\n" * 255, {}),
    "a name like git's": (".gitignore", {}),
    "backslashes": ("a\\..\\b", {}),
    "dots": ("...", {}),
    "a deep path": ("/".join("d" * 500), {}),
    "a time before 1970": ("a", {"written_at": -1}),
    "the first time": ("a", {"written_at": -(2**62)}),
    "no permissions": ("a", {"mode": 0}),
    "an empty file": ("a", {"size": 0}),
    "the files of a later node": ("a", {"node": 999}),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_script_writes_is_read(storage: RunStorage, kind: str) -> None:
    name, values = WRITTEN[kind]
    for key in (key_of("files", name), key_of("versions/0-1-x", name)):
        snapshot = Snapshot({name: replace(KeptFile(key, 3, 1), **values)})
        write_snapshot(storage, snapshot)
        assert read_snapshot(storage) == snapshot


@pytest.mark.parametrize(
    "name",
    [
        *("../a", "a/../../b", "/etc/passwd", "a//b", "", "a/", ".", "a\0", "\ud800", "x" * 256, "/".join("d" * 2100)),
        *(".git", ".GIT", "a/.git", "x/.Git/config", "git~1/hooks/x", ".git. ", ".g\u200cit/config"),
    ],
)
def test_name_of_others_counts_as_absent(storage: RunStorage, tmp_path: Path, name: str) -> None:
    files = {
        "a.pt": kept(storage, "files/a.pt", "1"),
        name: kept(storage, "files/other", "2"),
        "link": KeptFile(link="x"),
    }
    write_snapshot(storage, Snapshot(files))
    snapshot = read_snapshot(storage)
    assert (snapshot.files.keys(), snapshot.refused) == ({"a.pt", "link"}, (name,))
    assert restore(storage, snapshot.files, tmp_path / "folder") == []
    assert contents(tmp_path / "folder") == {"a.pt": "1", "link": "-> x"}
    assert publish(storage).files.keys() == {"a.pt", "link"}


@pytest.mark.parametrize("link", ["files", "files/d", "files/d/e", "files/d/e/f"])
def test_object_behind_a_link_is_neither_read_nor_deleted(storage: RunStorage, tmp_path: Path, link: str) -> None:
    below = "files/d/e/f".removeprefix(link).removeprefix("/")
    write(tmp_path, {f"victim/{below}" if below else "victim": "secret"})
    files = {"a": kept(storage, "versions/0-1-x/a", "1"), "b": KeptFile("files/d/e/f", 6)}
    Path(storage.path(link)).parent.mkdir(parents=True, exist_ok=True)
    Path(storage.path(link)).symlink_to(tmp_path / "victim")
    write_snapshot(storage, Snapshot(files))
    assert read_snapshot(storage).refused == ("b",)
    delete_others(storage, read_snapshot(storage))
    publish(storage)
    delete_others(storage, Snapshot())
    assert (tmp_path / "victim" / below).read_text() == "secret"


class FoldingPath(PosixPath):
    """A path on a disk that ignores case."""

    def __truediv__(self, key: str | os.PathLike[str]) -> Self:
        return super().__truediv__(str(key).lower())


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (["Model.pt", "model.pt"], ["model.pt"]),
        (["a", "A/b"], ["a"]),
        (["a/x", "A/y"], []),
        (["a/x", "A/X"], ["A/X"]),
        (["stra\u00dfe", "STRASSE"], ["STRASSE"]),
        (["\u00e9", "e\u0301"], ["e\u0301"]),
    ],
)
def test_names_that_are_one_on_the_disk(
    storage: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], left_out: list[str]
) -> None:
    monkeypatch.setattr("ray_on_ecs.names.ignores_case", lambda folder: True)
    files = {name: kept(storage, f"files/{number}", str(number)) for number, name in enumerate(names)}
    assert restore(storage, files, FoldingPath(tmp_path / "folder")) == left_out
    texts = {name.lower(): str(number) for number, name in enumerate(names) if name not in left_out}
    assert contents(tmp_path / "folder") == texts


@pytest.mark.parametrize("names", [["a", "a/key"], ["a/key", "a"]])
@pytest.mark.parametrize("below", [None, "y"])
def test_link_above_another_name_is_not_made(
    storage: RunStorage, tmp_path: Path, names: list[str], below: str | None
) -> None:
    write(tmp_path, {"victim/key": "secret"})
    (tmp_path / "victim" / "key").chmod(0o400)
    of_script = KeptFile(link=below) if below else kept(storage, "files/1", "new", mode=0o777)
    files = {"a": KeptFile(link=str(tmp_path / "victim")), "a/key": of_script}
    assert restore(storage, {name: files[name] for name in names}, tmp_path / "folder") == ["a"]
    assert contents(tmp_path / "victim") == {"key": "secret"}
    assert (tmp_path / "victim" / "key").stat().st_mode & 0o777 == 0o400
    assert contents(tmp_path / "folder") == {"a/key": f"-> {below}" if below else "new"}


def test_link_is_not_made_through_a_link_of_the_code(storage: RunStorage, tmp_path: Path) -> None:
    write(tmp_path, {"victim/a": "1", "folder/b": "1"})
    (tmp_path / "folder" / "d").symlink_to(tmp_path / "victim")
    restore(storage, {"d/link": KeptFile(link="x")}, tmp_path / "folder")
    assert contents(tmp_path / "victim") == {"a": "1"}
    assert contents(tmp_path / "folder") == {"b": "1", "d/link": "-> x"}
