"""The head's state is kept per version of Ray, and quarantined if the head can't start with it."""

from importlib.metadata import version
from pathlib import Path

import pytest

from ray_on_ecs.node import state
from ray_on_ecs.node.state import State

COMMAND_NAME = "ray-head"

RAY = version("ray")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_HEAD_STATE", str(tmp_path))
    return tmp_path


def write_database(folder: Path) -> Path:
    """Write a file of the state, as Ray would."""
    database = folder / RAY / "session_name"
    database.parent.mkdir()
    database.write_text("session")
    return database


def test_each_version_of_ray_has_its_own_state(folder: Path) -> None:
    assert state.open_state() == State(folder / RAY)
    assert State(folder / RAY).variables == {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": f"{folder}/{RAY}",
    }


def test_no_state_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_HEAD_STATE", raising=False)
    assert state.open_state() is None


def test_head_starts_without_a_writable_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_HEAD_STATE", str(folder / "missing"))
    assert state.open_state() is None
    assert "the head's state ends with its container" in capsys.readouterr().err


def test_two_failed_starts_quarantine_the_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = write_database(folder)
    state.open_state()
    state.open_state()
    assert database.exists(), "the first may just have been stopped"
    state.open_state()
    assert not database.parent.exists(), "the head would fail for ever"
    assert (folder / f"{RAY}.quarantine" / "session_name").read_text() == "session"
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"ray-head: 2 starts with {database.parent} failed")


def test_only_the_last_quarantined_state_is_kept(folder: Path) -> None:
    for content in ("first", "second"):
        write_database(folder).write_text(content)
        for _ in range(3):
            opened = state.open_state()
        assert opened is not None
        opened.mark_healthy()
    assert [path.name for path in folder.iterdir()] == [f"{RAY}.quarantine"]
    assert (folder / f"{RAY}.quarantine" / "session_name").read_text() == "second"


def test_healthy_start_resets_failed_starts(folder: Path) -> None:
    database = write_database(folder)
    for _ in range(4):
        opened = state.open_state()
        assert opened is not None
        opened.mark_healthy()
    assert database.exists()
