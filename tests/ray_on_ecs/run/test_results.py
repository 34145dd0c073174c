"""The results of a finished run of a script."""

from pathlib import Path

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.command_line import parse
from ray_on_ecs.run.results import check_not_finished, write_results
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.totals import earlier_of


def test_exported_weights_are_named(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    for name in ("model.safetensors", "best.safetensors"):
        storage.write(name, b"")
    config = parse(["--run-name", "first", "train.py"], {})
    document = write_results(storage, config, {"hardware": {}, "started_at": 0.0}, None, earlier_of(None))
    assert document["files"] == {
        "report": "report.html", "best": "best.safetensors", "model": "model.safetensors"
    }  # fmt: skip
    assert storage.read_json("result.json")["files"] == document["files"]


def test_finished_or_incompatible_run_is_refused(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    storage.write_json("config.json", {"format": 1, "settings": {}})
    check_not_finished(storage)
    storage.write_json("result.json", {})
    with pytest.raises(UsageError, match="--run-name: run 'first' is finished, results in "):
        check_not_finished(storage)
    storage.write_json("config.json", {"format": 2, "settings": {}})
    with pytest.raises(UsageError, match="run 'first' was written by another version; give another --run-name"):
        check_not_finished(storage)
