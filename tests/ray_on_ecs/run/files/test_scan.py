"""Scans of a folder: its regular files and links, the files that are open, and limits."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.run.files import scan as folder_scan
from ray_on_ecs.run.files.scan import (
    FileState,
    FolderScanner,
    is_growing,
    is_log,
    open_for_writing,
    select_within_limits,
    state_of,
)
from tests.run_folders import write


def test_files_and_links_are_found(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1", "deep/er/b": "2", ".hidden": "3"})
    links = {"link": "a", "dangling": "nowhere", "folder": "deep", "absolute": "/", "deep/up": ".."}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    scan = FolderScanner(tmp_path).scan()
    assert scan.keys() == {"a", "deep/er/b", ".hidden", *links}
    assert {name: scan[name].link for name in links} == links
    assert scan["deep/er/b"].size == 1


@pytest.mark.parametrize("folder", [".git", ".venv", "venv", "__pycache__", "node_modules", ".pytest_cache"])
def test_tool_folders_are_skipped(tmp_path: Path, folder: str) -> None:
    write(tmp_path, {f"{folder}/a": "1", f"deep/{folder}/a": "1", f"deep/my{folder}/a": "1"})
    assert FolderScanner(tmp_path).scan().keys() == {f"deep/my{folder}/a"}


@pytest.mark.parametrize("name", [".git", ".GIT", ".git.", "git~1", ".g\u200cit"])
def test_files_and_links_of_git_are_skipped(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: "gitdir: ../x", ".gitignore": "1", f"a{name}": "1", f"{name}x": "1"})
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).symlink_to("../a")
    assert FolderScanner(tmp_path).scan().keys() == {".gitignore", f"a{name}", f"{name}x"}


def test_special_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("ipc.sock")
        os.mkfifo("pipe")
        write(tmp_path, {"core": "1", "core.123": "1", "core.py": "1", "core.d/a": "1", "model.pt": "1"})
        assert FolderScanner(tmp_path).scan().keys() == {"core.py", "core.d/a", "model.pt"}


def test_excluded_paths_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"data/a": "1", "a": "1", "b": "1"})
    assert FolderScanner(tmp_path, lambda name, is_folder: name in ("data", "b")).scan().keys() == {"a"}


@pytest.mark.parametrize("change", ["content", "time", "mode", "inode", "link"])
def test_content_change_changes_the_state(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    os.utime(file, (1, 1))
    before = state_of(file)
    if change == "content":
        file.write_text("2")
    elif change == "time":
        os.utime(file, (1, 2))
    elif change == "mode":
        file.chmod(0o700)
    elif change == "inode":
        (tmp_path / "b").write_text("2")
        os.utime(tmp_path / "b", (1, 1))
        (tmp_path / "b").rename(file)
    else:
        file.unlink()
        file.symlink_to("b")
    assert state_of(file) not in (None, before)


def test_folder_with_many_entries_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "MAX_ENTRIES", 3)
    write(tmp_path, {f"{folder}{n}": "" for folder in ("", "few/", "deep/many/") for n in range(3)})
    write(tmp_path, {"3": "", "deep/many/3": ""})
    scanner = FolderScanner(tmp_path)
    assert scanner.scan().keys() == {"0", "1", "2", "3", "few/0", "few/1", "few/2"}
    assert scanner.too_many == {"deep/many/"}


def test_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": "1", "deep/secret/b": "2"})
    scanner, list_folder = FolderScanner(tmp_path), os.scandir  # root may read all

    def scandir(path: Path) -> Any:
        if path.name == "secret":
            raise PermissionError(path)
        return list_folder(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        assert scanner.scan().keys() == {"a"}
        assert scanner.unreadable == {"deep/secret/"}
    assert scanner.scan().keys() == {"a", "deep/secret/b"}
    assert not scanner.unreadable


def test_logs_are_recognized_by_name() -> None:
    names = ("train.log", "runs/events.out.tfevents.17.host", "model.pt", "metrics.csv", "latest.txt")
    assert [is_log(name) for name in names] == [True, True, False, False, True]
    assert [is_growing(name) for name in names] == [True, True, False, True, False]


def test_read_error_is_not_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": "1"})

    def fail(path: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Too many"):
        FolderScanner(tmp_path).scan()


def test_folder_deleted_during_the_scan_is_empty(tmp_path: Path) -> None:
    assert FolderScanner(tmp_path / "gone").scan() == {}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("r", {}), ("w", {"a": False}), ("a", {"a": True}), ("r+", {"a": False}), ("a+", {"a": True})],
)
def test_open_files_are_found(tmp_path: Path, mode: str, expected: dict[str, bool]) -> None:
    write(tmp_path, {"a": "1"})
    (tmp_path / "link").symlink_to(tmp_path)
    with (tmp_path / "a").open(mode):
        assert open_for_writing(tmp_path, [psutil.Process()]) == expected
        assert open_for_writing(tmp_path / "link", [psutil.Process()]) == expected
        assert open_for_writing(tmp_path / "other", [psutil.Process()]) == {}


def test_write_mode_overrides_append_mode(tmp_path: Path) -> None:
    with (tmp_path / "a").open("a"), (tmp_path / "a").open("r+"), (tmp_path / "a").open("a"):
        assert open_for_writing(tmp_path, [psutil.Process()]) == {"a": False}


def test_ended_process_has_no_open_files(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    ended = psutil.Process(process.pid)
    process.wait()
    assert open_for_writing(tmp_path, [ended]) == {}


@pytest.mark.parametrize(
    ("max_bytes", "max_files", "kept", "named"),
    [
        (100, 10, {"a", "b", "x/1", "x/2", "y/1"}, []),
        (40, 10, {"a", "b", "y/1"}, ["x/"]),
        (10, 10, {"b", "y/1"}, ["x/", "a"]),
        (100, 4, {"a", "b", "y/1"}, ["x/"]),
        (0, 10, set(), ["x/", "a", "y/", "b"]),
    ],
)
def test_largest_files_are_excluded(max_bytes: int, max_files: int, kept: set[str], named: list[str]) -> None:
    sizes = {"a": 30, "b": 1, "x/1": 20, "x/2": 20, "y/1": 9}
    files = {name: FileState(1, size, 1, 0o644, None) for name, size in sizes.items()}
    found, left_out = select_within_limits(files, max_bytes, max_files)
    assert found == kept
    assert [line.partition(" (")[0] for line in left_out] == named
