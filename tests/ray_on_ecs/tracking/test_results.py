"""The results of a finished run of a script."""

import sys
import time
from importlib import metadata
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import results
from ray_on_ecs.tracking.cost import earlier_of
from ray_on_ecs.tracking.results import check_not_finished, run_times, write_results
from ray_on_ecs.tracking.run_record import RunRecord
from tests.settings import parse

METRICS = b'{"step": 1, "time": "2026-11-26T23:16:42+00:00", "loss": 0.5}\n'


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "first")


def results_of(storage: RunStorage, **summary: Any) -> dict[str, Any]:
    config = parse(["--run-name", "first", "train.py"], {})
    return write_results(storage, config, {}, {"hardware": {}, "started_at": 0.0, **summary}, None, earlier_of(None))


class Absent(MetaPathFinder):
    """Hides a package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


def test_exported_weights_are_named(storage: RunStorage) -> None:
    for name in ("model.safetensors", "best.safetensors"):
        storage.write(name, b"")
    document = results_of(storage)
    assert document["files"] == {
        "report": "report.html", "best": "best.safetensors", "model": "model.safetensors"
    }  # fmt: skip
    assert storage.read_json("result.json")["files"] == document["files"]


@pytest.mark.parametrize("pool", [None, {"name": "h100", "zone": "us-west-2c"}])
def test_pool_is_in_the_results_if_there_is_one(storage: RunStorage, pool: Any) -> None:
    document = results_of(storage, **({"pool": pool} if pool else {}))
    assert document.get("pool", "missing") == (pool or "missing")
    record = RunRecord(storage, parse(["--run-name", "first", "train.py"], {}))
    record.pool = pool
    assert record.status().get("pool", "missing") == (pool or "missing")


@pytest.mark.parametrize(
    ("absent", "kinds"),
    [
        ((), {"report", "metrics", "curves", "events"}),
        (("matplotlib",), {"report", "metrics", "events"}),
        (("tensorboardX",), {"report", "metrics", "curves"}),
        (("matplotlib", "tensorboardX"), {"report", "metrics"}),
    ],
)
def test_absent_packages_cost_their_file_alone(
    storage: RunStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    absent: tuple[str, ...],
    kinds: set[str],
) -> None:
    caplog.set_level("INFO")
    for name in [module for module in sys.modules if module.partition(".")[0] in absent]:
        monkeypatch.delitem(sys.modules, name)
    for name in absent:
        monkeypatch.setattr(sys, "meta_path", [Absent(name), *sys.meta_path])
    storage.write(layout.METRICS, METRICS)
    document = results_of(storage)
    assert document["files"].keys() == kinds
    assert [line.rpartition("pip install --upgrade ")[2] for line in caplog.messages] == list(absent)
    assert all(storage.exists(document["files"][kind]) for kind in kinds - {"report"})


@pytest.mark.parametrize(
    "cause",
    [
        ModuleNotFoundError("No module named 'numpy.rec'", name="numpy.rec"),
        ImportError("numpy.core.multiarray failed to import"),
        AttributeError("_ARRAY_API not found"),
        OSError("libfreetype.so.6: cannot open shared object file"),
        RuntimeError("module compiled against ABI version 0x1000009\nbut this version of numpy is 0x2000000"),
        TypeError("Descriptors cannot be created directly."),
        ValueError("numpy.dtype size changed"),
        KeyError("figure.figsize"),
        MemoryError(),
        AssertionError(),
    ],
    ids=lambda cause: type(cause).__name__,
)
@pytest.mark.parametrize(("draw", "package"), [("plot", "matplotlib"), ("event_file", "tensorboardX")])
def test_broken_packages_cost_their_file_alone(
    storage: RunStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    draw: str,
    package: str,
    cause: Exception,
) -> None:
    caplog.set_level("INFO")
    for name in ("plot", "event_file"):
        monkeypatch.setattr(results, name, Mock(side_effect=cause) if name == draw else Mock(return_value=b"1"))
    storage.write(layout.METRICS, METRICS)
    document = results_of(storage)
    assert document["files"].keys() == {"report", "metrics", "events" if draw == "plot" else "curves"}
    [line] = caplog.messages
    assert line.endswith(f"; pip install --upgrade {package}")
    assert "\n" not in line
    assert "()" not in line


def test_a_lost_storage_is_not_a_broken_package(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(layout.METRICS, METRICS)
    monkeypatch.setattr(RunStorage, "write", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        results_of(storage)


@pytest.mark.parametrize(
    ("source", "cuda"),
    [(None, None), ("", None), ("cuda = None", None), ("cuda: Optional[str] = '12.8'", "12.8")],
    ids=["missing", "empty", "CPU", "CUDA"],
)
def test_cuda_of_an_incomplete_torch_is_unknown(
    storage: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, cuda: str | None
) -> None:
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.9.0\n")
    if source is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/version.py").write_text(f"from typing import Optional\n{source}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    document = results_of(storage)
    assert (document["versions"]["torch"], document["versions"]["cuda"]) == ("2.9.0", cuda)


def test_versions_of_absent_packages_are_unknown(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata.MetadataPathFinder, "find_distributions", lambda *_: iter(()))
    document = results_of(storage)
    known = {name for name, version in document["versions"].items() if version is not None}
    assert known == {"ray_on_ecs", "python"}
    assert "torch" in document["versions"]


def test_finished_run_is_refused(storage: RunStorage) -> None:
    check_not_finished(storage)
    storage.write_json("result.json", {})
    with pytest.raises(UsageError, match="--run-name: run 'first' is finished, results in "):
        check_not_finished(storage)


def test_times_are_those_of_this_command() -> None:
    times = run_times(time.time())
    assert list(times) == ["started", "script_start", "finished", "total_seconds", "to_script_start_seconds"]
    assert 0 < times["to_script_start_seconds"] <= times["total_seconds"]
