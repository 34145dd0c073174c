"""Commands of a run before anything starts: refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.main import main as command
from ray_on_ecs.command import RAY_SETTINGS
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted
from ray_on_ecs.run import admission, document
from ray_on_ecs.run.__main__ import main
from ray_on_ecs.run.code import archive
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage.run_storage import RunStorage


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage path; the current folder has a script."""
    for name, value in {**RAY_SETTINGS, "RAY_ON_ECS_STORAGE_PATH": str(tmp_path / "runs")}.items():
        monkeypatch.setenv(name, value)  # restored after the test
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    monkeypatch.chdir(code)
    return tmp_path / "runs"


@pytest.fixture
def large(storage: Path) -> Path:
    """The current folder, with files of 2 GiB, one of which is ignored."""
    folder = Path.cwd() / "data"
    folder.mkdir()
    Path(".gitignore").write_text("*.bin\n")
    for name, size in {"large.tar": 2**31, "ignored.bin": 2**31, "small.txt": 10}.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    return folder.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "SCRIPT: there is no file 'nowhere.py' in "),
        (["--working-dir", "nowhere", "x.py"], "--working-dir: 'nowhere' is not a folder"),
        (["--requirements", "nowhere.txt", "train.py"], "--requirements: 'nowhere.txt' can't be read"),
        (["--input", "data=nowhere", "train.py"], "--input: data=nowhere can't be read"),
    ],
    ids=["script", "working dir", "requirements", "input"],
)
def test_wrong_path_is_one_line_before_the_start(
    storage: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["run", "--local", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"ray-on-ecs: {message}")
    assert not [path for path in storage.glob("*") if path.name != ".code"]


def test_run_without_a_head_is_one_line(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    assert main([str(storage / "mine")]) == 3
    line = "ray-on-ecs: RAY_ADDRESS: is not set, so there is no Ray cluster to join; use ray-on-ecs run --local\n"
    assert capsys.readouterr() == ("", line)
    assert not storage.exists()


def test_finished_run_is_refused(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (storage / "first").mkdir(parents=True)
    (storage / "first" / "result.json").write_text("{}")
    assert command(["run", "--local", "--run-name", "first", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("ray-on-ecs: --run-name: run 'first' is finished, results in ")


def test_large_files_are_linked_on_this_machine(large: Path, storage: Path) -> None:
    config = RunConfig(command=("train.py",))
    stored = archive.store(config, RunStorage.open(str(storage), "mine"), lambda line: None, links=True)
    assert stored.links == {"data/large.tar": str(large / "data" / "large.tar")}


def test_too_much_code_is_one_line(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
    assert command(["run", "--num-workers", "1", "train.py"]) == 2
    out, err = capsys.readouterr()
    line = f"ray-on-ecs: --working-dir: {large} has 2.0 GiB, and code is at most 1.0 GiB; the largest are data/ "
    assert out == ""
    assert err.splitlines()[-1].startswith(line)


def test_interrupted_run_without_files_starts_anew(storage: Path) -> None:
    folder = RunStorage.open(str(storage), "cut")
    config = RunConfig(command=("train.py",), run_name="cut")
    document.write(folder, config, (), Code(name="code", archive="a.tar.gz"), {})
    with pytest.raises(Interrupted) as caught, admission.admit(folder.uri):
        raise KeyboardInterrupt
    again = "the same command with --run-name cut starts from the beginning"
    assert str(caught.value) == f"interrupted; nothing is stored yet, so {again}"


@pytest.mark.parametrize(
    ("given", "info", "workers"),
    [
        ({}, {"default_gpus": 2}, 2),
        ({}, {"default_gpus": 0}, None),  # a stack without GPUs
        ({}, {}, None),  # one of an earlier version
        ({}, None, None),  # not a stack
        ({"num_workers": "1:4"}, {"default_gpus": 2}, "1:4"),
        ({"driver": True}, {"default_gpus": 2}, None),
    ],
)
def test_run_without_a_number_of_workers_has_the_stacks(
    storage: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], info: Any, workers: Any
) -> None:
    monkeypatch.setattr(admission, "read_cluster_info", lambda: info)
    folder = RunStorage.open(str(storage), "default")
    config = RunConfig(command=("train.py",), run_name="default", **given)
    document.write(folder, config, given, Code(name="code", archive="a.tar.gz"), {})
    read = document.RunDocument.read(folder.uri, {}, None)
    assert admission.with_workers(read).config.num_workers == workers
