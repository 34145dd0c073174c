"""The last lines of a run."""

from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run import summary
from ray_on_ecs.run.metrics import MetricsLog
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.records import RecordFile


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ((), ""),
        (("TERMINATED",), ""),
        (
            ("ERROR", "TERMINATED", "ERROR"),
            "2 of 3 trials failed: trials.json says which, and error.txt in a trial's folder why\n",
        ),
    ],
    ids=["no sweep", "all well", "failed"],
)
def test_failed_trials_are_counted_in_the_last_line(
    statuses: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = RunStorage.open(str(tmp_path), "sweep")
    if statuses:
        storage.write_json(layout.TRIALS, {str(number): {"status": each} for number, each in enumerate(statuses)})
    summary._print_failed_trials(storage)
    assert capsys.readouterr().out == said


def test_metric_without_a_match_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    log = MetricsLog({"loss": "loss: (.*)"})
    log.read_line("loss: 0.5")
    RecordFile(storage).write(log)
    config = RunConfig(metric=("loss=loss: {number}", "accuracy=acc: {number}", "step=step {number}"))
    summary._print_unmatched_metrics(config, storage)
    assert capsys.readouterr().out == "--metric 'accuracy=acc: {number}': no line of the output matched\n"


def test_script_keeps_its_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(command=("bash", "-c", "python a.py && python b.py"), no_python=True, run_name="first")
    summary.print_header(config, RunStorage.open(str(tmp_path), "first"), None)
    assert "script   bash -c 'python a.py && python b.py'\n" in capsys.readouterr().out
