"""Jobs of the head in this container: where their records are, and how their drivers join Ray."""

from pathlib import Path

import pytest

from ray_on_ecs.contract import HEAD_STATE_VARIABLE
from ray_on_ecs.node import drivers


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-cluster")
    return tmp_path / "home"


def test_records_are_on_the_state_volume(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAD_STATE_VARIABLE, str(tmp_path / "state"))
    assert drivers.of_head().list_jobs() == []
    assert (tmp_path / "state" / "jobs").is_dir()
    assert not home.exists()


@pytest.mark.parametrize("parts", [("file",), ("file", "below")])
def test_head_without_a_usable_state_keeps_records_at_home(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(HEAD_STATE_VARIABLE, str(tmp_path.joinpath(*parts)))
    assert drivers.of_head().list_jobs() == []
    assert list((home / ".ray-on-ecs" / "jobs").iterdir())
