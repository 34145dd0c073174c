"""The reports of Ray Train and Ray Tune become metrics of the run, each once."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ray_on_ecs import sdk
from ray_on_ecs.run.metrics import MetricsLog, ReportReader
from ray_on_ecs.tracking.end import Steps
from tests.lazy import Lazy

program_reports = Lazy("ray_on_ecs.run.program.reports")
WITHOUT, WITH = SimpleNamespace(checkpoint=None), SimpleNamespace(checkpoint="folder")


@pytest.fixture(autouse=True)
def of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(program_reports, "_fits", iter(range(10)))


def log_of(folder: Path, history: Any = ()) -> MetricsLog:
    """The metrics of a run from the reports so far."""
    log = MetricsLog({}, history)
    for report in ReportReader(folder).read_new():
        log.take_report(report)
    return log


def records(folder: Path, history: Any = ()) -> list[dict[str, Any]]:
    log = log_of(folder, history)
    return [{name: value for name, value in record.items() if name != "time"} for record in log.records]


def run_of(folder: Path, snapshot: dict[str, Any] | None) -> Any:
    """The context of a run of Ray Train, whose folder has a snapshot of the checkpoints."""
    (folder / "one").mkdir()
    if snapshot is not None:
        (folder / "one" / program_reports.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).write_text(json.dumps(snapshot))
    return SimpleNamespace(run_config=SimpleNamespace(storage_path=str(folder), name="one", storage_filesystem=None))


def test_reports_are_numbered_records(tmp_path: Path) -> None:
    reporter = program_reports.TrainReporter()
    reporter.after_controller_start(run_of(tmp_path, None))
    reporter.before_worker_group_start(None)
    for epoch in range(2):
        metrics = {
            "epoch": np.int64(epoch),
            "loss": math.nan if epoch else 0.5,
            "name": "text",
            "step": 700,
            "ok": True,
        }
        reporter.after_report(WITHOUT, [metrics, {"epoch": 99}])
    assert records(tmp_path) == [
        {"step": 1, "epoch": 0.0, "loss": 0.5, "ok": 1.0},
        {"step": 2, "epoch": 1.0, "loss": None, "ok": 1.0},
    ]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (True, {"x": 1.0}),
        (False, {"x": 0.0}),
        (np.bool_(True), {"x": 1.0}),
        (np.float32(0.5), {"x": 0.5}),
        (np.array(3), {"x": 3.0}),
        (math.nan, {"x": None}),
        (-math.inf, {"x": None}),
        (np.float64("nan"), {"x": None}),
        ({"a": 1, "b": {"c": 0.5, "d": "text"}, "step": 3}, {"x/a": 1.0, "x/b/c": 0.5, "x/step": 3.0}),
        ({}, {}),
        ("text", {}),
        (None, {}),
        ([1, 2], {}),
        (np.array([1, 2]), {}),
        (np.array([1.5]), {"x": 1.5}),
        (torch.tensor([1.5]), {"x": 1.5}),
        (torch.empty((), device="meta"), {}),
        pytest.param(10**400, {}, id="too large"),
    ],
)
def test_value_of_a_report_becomes_numbers(value: Any, found: dict[str, float | None]) -> None:
    assert program_reports.numbers_of({"x": value, "time": 3.0}) == found


def test_settings_of_a_trial_are_not_its_metrics() -> None:
    result = {"config": {"lr": 0.1}, "done": True, "pid": 7, "loss": 0.5, "of": {"loss": 1}}
    assert program_reports._of_trial(result) == {"loss": 0.5, "of/loss": 1.0}


def test_reports_of_a_killed_program_come_from_checkpoints(tmp_path: Path) -> None:
    kept = [{"metrics": {"loss": 0.2}}, {"metrics": {"loss": 0.3}}]
    snapshot = {"checkpoint_results": kept, "checkpoint_report_indices": [1, 2], "current_report_index": 3}
    reporter = program_reports.TrainReporter()
    reporter.after_controller_start(run_of(tmp_path, snapshot))
    reporter.before_worker_group_start(None)
    reporter.after_report(WITH, [{"loss": 0.4}])
    before = [{"step": 1, "time": "", "loss": 0.1}, {"step": 2, "time": "of its first report", "loss": 0.2}]
    assert log_of(tmp_path, before).records[1]["time"] == "of its first report"
    assert [record["loss"] for record in records(tmp_path, before)] == [0.1, 0.2, 0.3, 0.4]


def test_reports_since_the_last_checkpoint_are_repeated(tmp_path: Path) -> None:
    reporter = program_reports.TrainReporter()
    reporter.before_worker_group_start(None)
    reporter.after_report(WITH, [{"loss": 1}])
    reporter.after_report(WITHOUT, [{"loss": 2}])
    reporter.before_worker_group_start(None)
    reporter.after_report(WITH, [{"loss": 3}])
    assert records(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 3.0}]


def test_second_trainer_continues_the_numbers(tmp_path: Path) -> None:
    for loss in (1, 2):
        reporter = program_reports.TrainReporter()
        reporter.before_worker_group_start(None)
        reporter.after_report(WITHOUT, [{"loss": loss}])
    assert records(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("path", ["gs://bucket/runs", "hdfs://host/runs", "s3://bucket/runs?region=us-east-1"])
def test_unreadable_storage_ends_no_run(path: str, tmp_path: Path) -> None:
    reporter = program_reports.TrainReporter()
    config = SimpleNamespace(storage_path=path, name="one", storage_filesystem=None)
    reporter.after_controller_start(SimpleNamespace(run_config=config))
    reporter.before_worker_group_start(None)
    reporter.after_report(WITHOUT, [{"loss": 2}])
    assert [record["loss"] for record in records(tmp_path, [{"step": 1, "time": "", "loss": 1.0}])] == [1.0, 2.0]


def test_total_steps_of_a_report_are_those_of_the_run(tmp_path: Path) -> None:
    reporter = program_reports.TrainReporter()
    reporter.after_controller_start(run_of(tmp_path, None))
    reporter.before_worker_group_start(None)
    reporter.after_report(WITHOUT, [{"loss": 0.5, "total_steps": 3}])
    log = log_of(tmp_path)
    assert log.steps == Steps(1, 3)
    assert "total_steps" not in log.records[0]


def test_tune_trials_are_records_and_a_table(tmp_path: Path) -> None:
    trials = [SimpleNamespace(trial_id=name, status="RUNNING", config={"lr": 0.1}, last_result={}) for name in "ab"]
    reporter = program_reports.TuneReporter()
    for number, trial in enumerate([*trials, trials[0]]):
        trial.last_result = {"loss": number, "pid": 1, "done": False, "step": 700, "time": 1, "trial": 9}
        reporter.on_trial_result(0, trials, trial, trial.last_result)
    trials[0].status = "TERMINATED"
    reporter.on_trial_complete(0, trials, trials[0])
    found = [(record["step"], record["trial"], record["loss"]) for record in records(tmp_path)]
    assert found == [(1, 0, 0), (2, 1, 1), (3, 0, 2)]
    program_reports.TuneReporter().on_experiment_end(
        [SimpleNamespace(trial_id="c", status="ERROR", config={}, last_result=None)]
    )
    table = json.loads((tmp_path / "trials.json").read_text())
    assert table["a"] == {"status": "TERMINATED", "config": {"lr": 0.1}, "metrics": {"loss": 2.0}}
    assert [*table] == ["a", "b", "c"]


class Odd:
    """A value of another library, such as a scalar tensor without `item`."""

    shape = ()

    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"weights": {(0, 1): 0.5}}, {"weights": {"(0, 1)": 0.5}}),
        ({"weights": {np.int64(0): 0.5}}, {"weights": {"0": 0.5}}),
        ({1: {2.5: {None: {True: 1}}}}, {"1": {"2.5": {"None": {"True": 1}}}}),
        ({"layers": [{(1,): 2}, ({(3,): 4},)]}, {"layers": [{"(1,)": 2}, [{"(3,)": 4}]]}),
        ({frozenset(): {1}}, {"frozenset()": "{1}"}),
        ({"lr": np.float32(0.5), "odd": Odd()}, {"lr": "0.5", "odd": "odd"}),
        (None, None),
        ([1], [1]),
    ],
)
def test_any_configuration_of_a_trial_is_in_the_table(tmp_path: Path, config: Any, stored: Any) -> None:
    trial = SimpleNamespace(trial_id="a", status="TERMINATED", config=config, last_result={"odd": Odd(), "loss": 1})
    program_reports.TuneReporter().on_trial_complete(0, [trial], trial)
    table = json.loads((tmp_path / "trials.json").read_text())
    assert table == {"a": {"status": "TERMINATED", "config": stored, "metrics": {"loss": 1.0}}}


class Broken:
    """A value that can't be shown."""

    def __str__(self) -> str:
        raise TypeError


def test_configuration_that_cannot_be_written_hides_no_other_trial(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    config["itself"] = config
    configs = {"a": config, "b": {"x": Broken()}, "c": {"lr": 1}}
    trials = [SimpleNamespace(trial_id=name, status="ERROR", config=configs[name], last_result={}) for name in configs]
    program_reports.TuneReporter().on_experiment_end(trials)
    table = json.loads((tmp_path / "trials.json").read_text())
    assert {name: row["config"] for name, row in table.items()} == {"a": None, "b": None, "c": {"lr": 1}}


def test_table_that_cannot_be_written_does_not_end_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "trials.part").mkdir()
    trial = SimpleNamespace(trial_id="a", status="TERMINATED", config={}, last_result={})
    program_reports.TuneReporter().on_trial_complete(0, [trial], trial)
    assert not (tmp_path / "trials.json").exists()


def test_sweep_and_later_trainer_add_records(tmp_path: Path) -> None:
    before = [{"step": number, "time": "", "loss": number} for number in (1, 2)]  # of a killed program
    sweep = program_reports.TuneReporter()
    trial = SimpleNamespace(trial_id="a", status="RUNNING", config={}, last_result={})
    sweep.on_trial_result(0, [trial], trial, {"loss": 3})
    trainer = program_reports.TrainReporter()
    trainer.after_controller_start(run_of(tmp_path, None))
    trainer.before_worker_group_start(None)
    trainer.after_report(WITHOUT, [{"loss": 4}])
    assert [record["loss"] for record in records(tmp_path, before)] == [1, 2, 3, 4]
