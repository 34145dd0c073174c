"""The results of a finished run of a script."""

import time
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import earlier_of
from ray_on_ecs.tracking.results import check_not_finished, run_times, write_results
from ray_on_ecs.tracking.run_record import RunRecord
from tests.settings import parse


def test_exported_weights_are_named(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    for name in ("model.safetensors", "best.safetensors"):
        storage.write(name, b"")
    config = parse(["--run-name", "first", "train.py"], {})
    document = write_results(storage, config, {}, {"hardware": {}, "started_at": 0.0}, None, earlier_of(None))
    assert document["files"] == {
        "report": "report.html", "best": "best.safetensors", "model": "model.safetensors"
    }  # fmt: skip
    assert storage.read_json("result.json")["files"] == document["files"]


@pytest.mark.parametrize("pool", [None, {"name": "h100", "zone": "us-west-2c"}])
def test_pool_is_in_the_results_if_there_is_one(tmp_path: Path, pool: Any) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    config = parse(["--run-name", "first", "train.py"], {})
    summary = {"hardware": {}, "started_at": 0.0, **({"pool": pool} if pool else {})}
    document = write_results(storage, config, {}, summary, None, earlier_of(None))
    assert document.get("pool", "missing") == (pool or "missing")
    record = RunRecord(storage, config)
    record.pool = pool
    assert record.status().get("pool", "missing") == (pool or "missing")


def test_finished_run_is_refused(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    check_not_finished(storage)
    storage.write_json("result.json", {})
    with pytest.raises(UsageError, match="--run-name: run 'first' is finished, results in "):
        check_not_finished(storage)


def test_times_are_those_of_this_command() -> None:
    times = run_times(time.time())
    assert list(times) == ["started", "script_start", "finished", "total_seconds", "to_script_start_seconds"]
    assert 0 < times["to_script_start_seconds"] <= times["total_seconds"]
