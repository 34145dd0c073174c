"""Paths of a user that can't be folders: one line with status 2, before anything is written."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from tests.ray_on_ecs.cli.folders import Folders

COMMANDS = (["fetch"], ["open", "--no-browser"])
OTHERS = (["rm"], ["logs"], ["stop"], ["debug"])
PATHS = {  # the path that a user types, and what is in its place
    "file": "file",
    "file/sub": "file",
    "dangling": "dangling",
    "dangling/sub": "dangling",
    "to-file": "to-file",
    "loop": "loop",
    "fifo": "fifo",
    "/dev/null": "/dev/null",
}


@pytest.fixture
def folders(folders: Folders) -> Folders:
    """A storage path with a run, `first`, next to paths that are not folders."""
    folders.script("first", records=2)
    folders.status("first", "finished")
    folders.of("first").write("logs/first.txt", "epoch 1\n")
    Path("file").write_text("1")
    Path("dangling").symlink_to("nowhere")
    Path("to-file").symlink_to("file")
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")
    return folders


def line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command; return its only line, without the name of the program."""
    assert main([words[0], "--local", *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.strip().removeprefix("ray-on-ecs: ")


@pytest.mark.parametrize("path", PATHS)
def test_copy_into_another_file_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str], path: str) -> None:
    for command in COMMANDS:
        there = Path(PATHS[path]).absolute()
        assert line(capsys, *command, "first", path) == f"DIR: {there} is not a folder; give another folder"


@pytest.mark.parametrize("command", COMMANDS)
def test_file_with_the_name_of_the_run_is_refused(
    folders: Folders, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Path("runs").mkdir()
    Path("runs/first").write_text("1")
    assert line(capsys, *command, "first").endswith("runs/first is not a folder; give another folder")
    assert Path("runs/first").read_text() == "1"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_folder_without_permission_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str], mode: int) -> None:
    Path("closed").mkdir(mode=mode)
    for command in COMMANDS:
        assert line(capsys, *command, "first", "closed").endswith("closed can't be written; give another folder")


def test_report_that_is_a_folder_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/first/report.html").mkdir(parents=True)
    assert line(capsys, "open", "--no-browser", "first").startswith("DIR: ")


def test_history_on_a_pipe_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("page.html")
    assert "page.html is not a page of this command" in line(capsys, "history", "--no-browser", "page.html")


@pytest.mark.parametrize("path", PATHS)
def test_storage_path_that_is_another_file_is_refused(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    there = Path(PATHS[path]).absolute()
    Path("train.py").write_text("print(1)")
    expected = f"--storage-path: {there} is not a folder; give another folder"
    assert line(capsys, "run", "--storage-path", path, "train.py") == expected
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", path)
    expected = f"RAY_ON_ECS_STORAGE_PATH: {there} is not a folder; set it to the folder or bucket with the runs"
    for words in (["runs"], ["history", "--no-browser"], *([*each, "first"] for each in (*OTHERS, *COMMANDS))):
        assert line(capsys, *words) == expected


@pytest.mark.parametrize("path", ["results", "results/first", "results/first/new", "link", "results/first/files/.."])
def test_copy_into_the_run_itself_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str], path: str) -> None:
    Path("link").symlink_to("results")
    before = sorted(Path("results").rglob("*"))
    own = Path("results/first").absolute()
    assert line(capsys, "fetch", "first", path).endswith(
        f" belongs to the run's own folder, {own}; give another folder"
    )
    assert sorted(Path("results").rglob("*")) == before
    assert main(["fetch", "--local", "first", "."]) == 0


def test_target_of_the_results_is_checked_before_the_run(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print(1)")
    for path, reason in {"results": "belongs to the run's own folder, ", "file": f"{Path.cwd()}/file is not a"}.items():
        found = line(capsys, "run", "--fetch", path, "--run-name", "second", "train.py")
        assert found.startswith("--fetch: ")
        assert reason in found
    assert not Path("results/second").exists()
