"""The index of checkpoints: a checkpoint that is half deleted is absent."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from ray_on_ecs.checkpoint.index import FORMAT, CheckpointIndex, Manifest, as_json, differences
from ray_on_ecs.storage.run_storage import RunStorage


def index(storage: RunStorage) -> CheckpointIndex:
    return CheckpointIndex(storage, keep_last=1, keep_best=None, best_mode="min", say=print)


def manifest(step: int) -> Manifest:
    files = {"weights": {"bytes": 7, "sha256": ""}, "zero": {"bytes": 7, "sha256": ""}}
    others = {"epoch": 0, "metrics": {}, "world_size": 1, "config": {}, "left_out": 0}
    return cast(Manifest, {"format": FORMAT, "step": step, "files": files, **others})


def test_partly_deleted_checkpoint_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RunStorage.open(str(tmp_path), "run")

    def lose_connection(storage: RunStorage, name: str) -> None:
        Path(storage.path(name, "weights")).unlink()
        raise OSError("the connection is lost")

    monkeypatch.setattr(RunStorage, "delete_folder", lose_connection)
    checkpoints = index(storage)
    for step in (1, 2):
        name = checkpoints.new_name(step)
        for file in ("weights", "zero"):
            storage.write(f"{name}/{file}", "numbers")
        checkpoints.commit(name, manifest(step))
    assert not (tmp_path / "run" / "step-000000001" / "weights").exists()
    entries = index(storage)
    entries.discard("step-000000002")
    assert entries.newest is None


@pytest.mark.parametrize("number", [1, 2, 9, 10])
def test_last_of_a_step_is_the_newest(tmp_path: Path, number: int) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    for name in [f"step-000000001-{each}" for each in range(1, number + 1)]:
        storage.write_json(f"{name}/checkpoint.json", manifest(1))
    newest = index(storage).newest
    assert newest
    assert newest[0] == f"step-000000001-{number}"


@pytest.mark.parametrize("name", ["step-best", "step-1", "step-000000001-a", "step-000000001.old"])
def test_folder_of_another_name_stays(tmp_path: Path, name: str) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    storage.write(f"{name}/weights", "numbers")
    checkpoints = index(storage)
    first = checkpoints.new_name(2)
    for file in ("weights", "zero"):
        storage.write(f"{first}/{file}", "numbers")
    checkpoints.commit(first, manifest(2))
    assert storage.exists(f"{name}/weights")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}),
        ({"a": [{"b": 1, "c": 2}]}, {"a": [{"c": 2, "b": 1}]}),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"d": 2, "c": 1}}}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": {2: 1, 1: 2}}, {"a": {1: 2, 2: 1}}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"a": {3, 1, 2}}, {"a": {1, 2, 3}}),
        ({"a": float("nan")}, {"a": float("nan")}),
        ({"a": None}, {"a": None}),
    ],
    ids=str,
)
def test_equal_settings_do_not_differ(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert differences(json.loads(json.dumps(as_json(before))), as_json(now)) == ""


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ({"a": None}, {}, "a was null and is not set"),
        ({}, {"a": None}, "a was not set and is null"),
        ({"a": "1"}, {"a": 1}, 'a was "1" and is 1'),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a was [1, 2] and is [2, 1]"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, 'a was {"b": 1} and is {"b": 2}'),
    ],
    ids=str,
)
def test_other_settings_differ(before: dict[str, Any], now: dict[str, Any], line: str) -> None:
    assert differences(as_json(before), as_json(now)) == line
