"""A script's metrics: from its output, from the SDK, and again after a restart."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_on_ecs import sdk
from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.metrics import MetricsLog, ReportReader, tracker_url
from ray_on_ecs.tracking.end import Steps

PATTERNS = {"loss": r"loss: (\S+)", "accuracy": r"acc=([0-9.]+)", "step": r"step (\d+)"}


@pytest.fixture(autouse=True)
def no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the number of all steps that another test's training has reported."""
    monkeypatch.setattr(sdk, "_total", None)


def values(log: MetricsLog) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "time"} for record in log.records]


def test_values_of_a_step_form_one_record() -> None:
    log = MetricsLog(PATTERNS)
    for line in ("step 10 loss: 0.5", "acc=0.25", "nothing", "step 20 loss: 0.4 acc=0.5"):
        log.read_line(line)
    assert values(log) == [{"step": 10, "loss": 0.5, "accuracy": 0.25}, {"step": 20, "loss": 0.4, "accuracy": 0.5}]


@pytest.mark.parametrize("pattern", [r"loss(?:=([0-9.]+))?", r"loss=([0-9.]+)|no loss", r"loss ?([0-9.]*)"])
def test_group_that_matches_nothing_is_null(pattern: str) -> None:
    log = MetricsLog({"loss": pattern})
    log.read_line("no loss yet")
    assert values(log) == [{"step": 1, "loss": None}]


def test_repeated_name_without_steps_begins_a_record() -> None:
    log = MetricsLog(PATTERNS)
    for line in ("loss: 0.5", "acc=0.25", "loss: 0.4", "acc=0.5"):
        log.read_line(line)
    assert values(log) == [{"step": 1, "loss": 0.5, "accuracy": 0.25}, {"step": 2, "loss": 0.4, "accuracy": 0.5}]


@pytest.mark.parametrize(
    ("line", "guess"),
    [
        ("step 100 | loss 2.31", {"step": 100, "loss": 2.31}),
        ("loss: 0.52", {"loss": 0.52}),
        ("Epoch 3/10 loss=0.5", {"loss": 0.5}),
        ("Epoch: [2]  [ 14/15]  eta: 0:00:05  loss: 1.5 (1.6)", {"step": 14, "loss": 1.5}),
        ("Train: 3/10 loss 1.5", {"loss": 1.5}),
        ("Epoch: [2/10] loss 1.5", {"loss": 1.5}),
        (" 50%|###   | 5/10 [00:01<00:01, 4.9it/s, loss=1e-3]", {"step": 5, "loss": 0.001}),
        ("[rank0]: global_step=7 loss=nan", {"step": 7, "loss": None}),
        ("loss: 0.4 - val_loss: 0.6", {"loss": 0.4}),
        ("loss 0.5 step 0.25s", {"loss": 0.5}),
        ("Test set: Average loss: 0.05", {}),
        ("Validating: loss 0.5", {}),
        ("Evaluating... loss: 9", {}),
        ("loss: 1.5.2", {}),
        ("glossary 3", {}),
        ("step 5 done", {}),
    ],
)
def test_loss_and_step_are_guessed_without_flags(line: str, guess: dict[str, float]) -> None:
    log = MetricsLog({})
    log.read_line(f"{line}\n")
    assert log.guess == guess
    assert (log.step, log.records) == (None, [])


def test_a_guessed_step_is_on_the_line_of_its_loss() -> None:
    log = MetricsLog({})
    log.read_line("step 5 loss: 2.5")
    log.read_line("loss: 2.0")
    assert log.guess == {"loss": 2.0}


@pytest.mark.parametrize(
    "end",
    [
        "{'train_runtime': '17.98', 'train_steps_per_second': '5.561', 'train_loss': '4.353', 'epoch': '2'}",
        "{'train_runtime': 17.9812, 'train_loss': 4.353412, 'epoch': 2.0}",
        "[INFO|trainer.py:1] >> {'train_runtime': 17.9812, 'train_loss': 4.353412}",
        "  train_loss               =     4.3534",
        "train_loss               = 4.3534",
    ],
)
def test_mean_of_all_losses_is_not_the_last_one(end: str) -> None:
    """In a run of LLaMA-Factory it was 4.35, and the last loss 3.86."""
    log = MetricsLog({})
    log.read_line(end)
    assert log.guess is not None
    assert log.guess["loss"] == pytest.approx(4.353, abs=1e-3)  # a short training prints no other one
    log.read_line(" 50%|###   | 50/100 [00:01<00:01, 4.9it/s]")
    log.read_line("{'loss': '3.856', 'grad_norm': '1.079', 'epoch': '2'}")
    log.read_line(end)
    assert log.guess == {"loss": 3.856, "step": 50}
    log.restart()
    log.read_line(end)
    assert log.guess == {"loss": 3.856, "step": 50}


def indented(results: Any) -> list[str]:
    return json.dumps(results, indent=4).splitlines()


@pytest.mark.parametrize(
    ("lines", "guess"),
    [
        (indented({"epoch": 3, "train": {"loss": 1.5}, "validation": {"loss": 9.5, "top1": 3}}), {"loss": 1.5}),
        (
            indented({"eval": {"loss": 9.5, "of": {"loss": 9.4}, "other loss": 9.3}, "train": {"loss": 1.5}}),
            {"loss": 1.5},
        ),
        (indented([{"test_metrics": {"loss": 9.5}}, {"train": {"loss": 1.5}}]), {"loss": 1.5}),
        (indented({"valid": {"loss": 9.5}}), {"loss": 2.0}),
        (indented({"val": {}, "loss": 1.5}), {"loss": 1.5}),
        (["val = {", "  'loss': 9.5,", "}", "loss: 1.5"], {"loss": 1.5}),
        (["val = {", "  'loss': 9.5}", "loss: 1.5"], {"loss": 1.5}),
        (["val = {", "", "  'loss': 9.5}", "eval = {", "  'loss': 9.4}"], {"loss": 2.0}),
        (["--result", *indented([{"epoch": 1, "train": {"loss": 9.5}, "validation": {"loss": 9.4}}])], {"loss": 2.0}),
        (["--result of step 3", "loss: 1.5"], {"loss": 1.5}),
        (["validating {", "loss: 1.5"], {"loss": 1.5}),
        (indented({"train": {"loss": 1.5}}), {"loss": 1.5}),
    ],
)
def test_loss_of_a_validation_in_indented_json_is_not_shown(lines: list[str], guess: dict[str, float]) -> None:
    """The last loss of timm was that of a validation: it ends with the results of its best epochs."""
    log = MetricsLog({})
    for line in ["Epoch 3 | Loss: 2.0", *lines]:
        log.read_line(line)
    assert log.guess == guess
    assert not log.extent.falls


@pytest.mark.parametrize(
    "line", ["train_loss = 3.5", "epoch 3: {'train_loss': 3.5, 'epoch': 3}", "train_loss=3.5", "{'loss': 3.5}"]
)
def test_loss_of_each_epoch_replaces_the_one_before(line: str) -> None:
    log = MetricsLog({})
    log.read_line("loss: 4.5")
    log.read_line(line)
    assert log.guess == {"loss": 3.5}


def test_reports_or_patterns_disable_guessing() -> None:
    log = MetricsLog({})
    log.read_line("step 100 | loss 2.31")
    log.take_report({"step": 3, "values": {"loss": 0.5}})
    log.read_line("step 200 | loss 1.5")
    assert (log.guess, log.step, values(log)) == (None, 3, [{"step": 3, "loss": 0.5}])
    for others in (MetricsLog(PATTERNS), MetricsLog({}, [{"step": 10, "time": "", "loss": 0.5}])):
        others.read_line("iteration 7 | loss 2.31")
        assert others.guess is None


def test_repeated_steps_replace_their_records() -> None:
    before = [{"step": 10, "time": "", "loss": 0.5}, {"step": 20, "time": "", "loss": 0.4}]
    log = MetricsLog(PATTERNS, [*before, {"step": 30, "time": "", "loss": 9.0}])
    log.read_line("step 20 loss: 0.41")
    assert values(log) == [{"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.41}]


def steps_of(log: MetricsLog) -> list[int]:
    return [record["step"] for record in log.records]


@pytest.mark.parametrize(
    ("printed", "recorded"),
    [
        ([10, 20, 30] * 3, [10, 20, 30, 40, 50, 60, 70, 80, 90]),
        ([1, 2, 3] * 2, [1, 2, 3, 4, 5, 6]),
        ([0, 1, 2] * 2, [0, 1, 2, 3, 4, 5]),
        ([30, 60, 90, 20, 50, 80, 10], [30, 60, 90, 110, 140, 170, 180]),
        ([1, 2, 1, 2], [1, 2, 3, 4]),
        ([30, 30, 30], [30, 30, 30]),
        ([1, 2, 2, 3], [1, 2, 2, 3]),
        ([0, 0], [0, 0]),
        ([100, 3, 5], [100, 103, 105]),
    ],
    ids=str,
)
@pytest.mark.parametrize("reports", [False, True], ids=["printed", "reported"])
def test_steps_of_each_epoch_keep_their_records(printed: list[int], recorded: list[int], reports: bool) -> None:
    log = MetricsLog(PATTERNS)
    for number, step in enumerate(printed):
        if reports:
            log.take_report({"step": step, "values": {"loss": number}})
        else:
            log.read_line(f"step {step} loss: {number}")
    assert [record["loss"] for record in log.records] == list(range(len(printed)))
    assert steps_of(log) == recorded
    assert log.step == printed[-1], "the step of the epoch is shown"


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ([10, 11, 12, 11, 13], [(10, 0), (11, 3), (13, 4)]),
        ([10, 20, 30, 20], [(10, 0), (20, 3)]),
        ([1, 2, 3, 1, 2, 3, 2], [(1, 0), (2, 1), (3, 2), (4, 3), (5, 6)]),  # in the second epoch
    ],
    ids=str,
)
def test_a_step_back_replaces_its_records(printed: list[int], kept: list[tuple[int, int]]) -> None:
    log = MetricsLog(PATTERNS)
    for number, step in enumerate(printed):
        log.read_line(f"step {step} loss: {number}")
    assert [(record["step"], record["loss"]) for record in log.records] == kept


def test_steps_that_begin_again_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(PATTERNS)
    for step in [10, 20, 30] * 3:
        log.read_line(f"step {step} loss: 1")
    log.restart()
    for step in (10, 20):
        log.read_line(f"step {step} loss: 1")
    [line] = caplog.messages
    assert line.startswith("step 10 follows step 30, ")
    assert steps_of(log) == [*range(10, 120, 10)], "it is not known in which epoch the later start began"


@pytest.mark.parametrize(("again", "recorded"), [(20, [10, 20]), (25, [10, 20, 25]), (1, [1]), (40, [10, 20, 30, 40])])
def test_later_start_replaces_steps_from_its_first(again: int, recorded: list[int]) -> None:
    log = MetricsLog({})
    for step in (10, 20, 30):
        log.take_report({"step": step, "values": {"loss": 1.0}})
    log.restart()
    log.take_report({"step": again, "values": {"loss": 2.0}})
    assert steps_of(log) == recorded


@pytest.mark.parametrize("name", ["step", "time"])
@pytest.mark.parametrize("value", [1.5, None, -1.0, 0.0])
def test_metric_of_a_records_own_name_is_left_out(caplog: pytest.LogCaptureFixture, name: str, value: Any) -> None:
    log = MetricsLog({})
    for step in (1, 2):
        log.take_report({"step": step, "values": {name: value, "loss": 0.5}})
        log.take_report({"step": step, "values": {name: value}})
    assert values(log) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]
    assert all(isinstance(record["time"], str) for record in log.records)
    [line] = caplog.messages
    assert line.startswith(f"metric {name}: {value} is left out")


@pytest.mark.parametrize(
    ("given", "step"),
    [
        *((5, 5), (0, 0), (5.0, 5), (True, 1), (np.int64(5), 5), (np.float32(5), 5), (torch.tensor(5), 5)),
        *((torch.tensor([5.0]), 5), ("5", 5), (-1, 3), (1.5, 3), (math.nan, 3), (math.inf, 3), (-math.inf, 3)),
    ],
    ids=str,
)
def test_step_among_metrics_is_their_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Any, step: int
) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "_step", 3)
    sdk.log(step=given, loss=0.5)
    log = MetricsLog({})
    for report in ReportReader(tmp_path).read_new():
        log.take_report(report)
    assert values(log) == [{"step": step, "loss": 0.5}]
    log.take_report({"step": step + 1, "values": {"loss": 0.25}})
    assert steps_of(log) == [step, step + 1]


@pytest.mark.parametrize("text", ["nan", "inf", "x", "-"])
def test_printed_step_that_is_no_number_is_left_out(text: str) -> None:
    log = MetricsLog({**PATTERNS, "step": r"step (\S+)"})
    for line in ("step 3 loss: 1", f"step {text} loss: 2"):
        log.read_line(line)
    assert steps_of(log) == [3, 3]


def start(log: MetricsLog, epochs: range, loss: float) -> None:
    """Let a start print an epoch and a loss in turn, without the number of a step."""
    log.restart()
    for epoch in epochs:
        log.read_line(f"epoch {epoch}")
        log.read_line(f"loss: {loss}")


@pytest.mark.parametrize(("begin", "losses"), [(0, [2.0, 2.0]), (2, [1.0, 1.0, 2.0, 2.0]), (4, [1.0] * 4 + [2.0, 2.0])])
def test_later_start_replaces_records_from_where_it_begins(begin: int, losses: list[float]) -> None:
    log = MetricsLog({"loss": "loss: ([0-9.]+)"})
    start(log, range(4), 1.0)
    start(log, range(begin, begin + 2), 2.0)
    assert [record["loss"] for record in values(log)] == losses
    assert [record["step"] for record in values(log)] == list(range(1, len(losses) + 1))


def test_records_stay_where_epochs_are_not_printed() -> None:
    log = MetricsLog({"loss": "loss: ([0-9.]+)"})
    for _ in range(2):
        log.restart()
        log.read_line("loss: 1")
        log.read_line("loss: 2")
    assert [record["loss"] for record in values(log)] == [1.0, 2.0, 1.0, 2.0]


def test_a_loss_takes_the_step_of_the_bar_before_it() -> None:
    log = MetricsLog({})
    log.read_line(" 81%|####2 | 325/400 [01:02<00:14,  5.1it/s]")
    assert log.guess == {"step": 325}
    log.read_line("{'loss': '5.811', 'grad_norm': '1.451', 'epoch': '0.27'}")
    assert log.guess == {"step": 325, "loss": 5.811}
    log.read_line(" 82%|####2 | 328/400 [01:02<00:14,  5.1it/s]")
    assert log.guess == {"step": 328, "loss": 5.811}


@pytest.mark.parametrize("text", ["nan", "inf", "none", "1e999"])
def test_non_finite_values_are_null(text: str) -> None:
    log = MetricsLog(PATTERNS)
    log.read_line(f"loss: {text}")
    assert values(log) == [{"step": 1, "loss": None}]
    json.dumps(log.records, allow_nan=False)


def test_sdk_reports_reach_the_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "PROGRESS_SECONDS", 0.0)
    reader = ReportReader(tmp_path)
    assert reader.read_new() == []
    sdk.progress(3)
    sdk.log(loss=0.5, grad=math.nan)
    assert reader.read_new() == [{"step": 3}, {"step": 3, "values": {"loss": 0.5, "grad": None}}]
    with (tmp_path / sdk.REPORTS).open("a") as file:
        file.write('{"step": 4}\n{"st')
    assert reader.read_new() == [{"step": 4}]
    with (tmp_path / sdk.REPORTS).open("a") as file:
        file.write('ep": 5}\n')
    assert reader.read_new() == [{"step": 5}]


@pytest.mark.parametrize(
    "torn",
    [
        *(
            b'{"step": 5, "va{"step": 6}',
            b'{"step": 5, "va',
            b"",
            b"\0\0\0",
            b"\xff\xfe{",
            b"5",
            b"null",
            b"[]",
            b'"step"',
        ),
        *(b"{}", b'{"values": {"loss": 1.0}}', b'{"step": "5"}', b'{"step": 5, "values": [1]}', b"[" * 10_000),
        *(b'{"step": 1.5}', b'{"step": 5, "total": "all"}', b'{"step": 5}\0'),
    ],
    ids=lambda torn: str(torn[:30]),
)
def test_torn_report_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes) -> None:
    reader = ReportReader(tmp_path)
    for step in (4, 7):
        with (tmp_path / sdk.REPORTS).open("ab") as file:
            file.write(torn + b'\n{"step": %d}\n{"st' % step)
        assert reader.read_new() == [{"step": step}]
        with (tmp_path / sdk.REPORTS).open("ab") as file:
            file.write(b'ep": 8}\n')
        assert reader.read_new() == [{"step": 8}]
    assert len(caplog.messages) == 1


def test_fast_steps_are_reported_at_intervals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "PROGRESS_SECONDS", 3600.0)
    monkeypatch.setattr(sdk, "_reported_at", -math.inf)
    for step in range(1000):
        sdk.progress(step)
    sdk.log(loss=1.0)
    assert ReportReader(tmp_path).read_new() == [{"step": 0}, {"step": 999, "values": {"loss": 1.0}}]


@pytest.mark.parametrize("variable", sdk.RANK_VARIABLES)
def test_other_ranks_of_a_node_only_send_heartbeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sdk, "_reported_at", -math.inf)
    sdk.progress(3)
    sdk.log(loss=0.5)
    assert ReportReader(tmp_path).read_new() == [{"step": None}]


@pytest.mark.parametrize(
    ("total", "known"),
    [
        *((1000, 1000), (1e3, 1000), (0, None), (-1, None), (math.inf, None), (math.nan, None), (2, 2)),
        *((np.int64(1000), 1000), (np.float32(1000), 1000), (torch.tensor(1000), 1000)),
    ],
    ids=str,
)
def test_total_of_the_steps_holds_until_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: Any, known: int | None
) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "PROGRESS_SECONDS", 0.0)
    log, reader = MetricsLog({}), ReportReader(tmp_path)

    def steps_after(*arguments: Any) -> Steps | None:
        sdk.progress(*arguments)
        for report in reader.read_new():
            log.take_report(report)
        return log.steps

    assert steps_after(1) == Steps(1, None)
    step = torch.tensor(3) if torch.is_tensor(total) else type(total)(3)
    assert steps_after(step, total) == Steps(3, known)
    sdk.log(loss=0.5)
    assert steps_after(4) == Steps(4, known)
    assert steps_after(5, 2000) == Steps(5, 2000)


def test_total_of_a_fast_step_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "_reported_at", -math.inf)
    sdk.progress(1)
    sdk.progress(2, 100)
    monkeypatch.setattr(sdk, "PROGRESS_SECONDS", 0.0)
    sdk.progress(3)
    assert ReportReader(tmp_path).read_new() == [{"step": 1}, {"step": 3, "total": 100}]


@pytest.mark.parametrize(
    ("metrics", "line", "steps"),
    [
        (("step=step {number}",), "step 5/100 loss: 1", Steps(5, 100)),
        (("step=step {number}", "total_steps=of {number}"), "step 5 of 100", Steps(5, 100)),
        (("step=step {number}", "total_steps=max {number}"), "step 5/20, max 100", Steps(5, 100)),
        (("step=update {number}",), "step 5/100 update 9", Steps(9, None)),
        (("step=step {number}",), "Epoch [2/5], step 100/600", Steps(100, None)),
        (("step=step {number}",), "Epoch [1/5], step 100/600", Steps(100, 3000)),
        (("step=step {number}",), "Epoch 2, step 100/600", Steps(100, None)),
        (("step=step {number}", "total_steps=max {number}"), "step 5/20", Steps(5, None)),
        (("step=step {number}", "total_steps=of {number}"), "step 5 of nan", Steps(5, None)),
        (("loss=loss: {number}",), "step 5/100 loss: 1", Steps(5, 100)),
    ],
)
def test_total_of_the_steps_from_the_output(metrics: tuple[str, ...], line: str, steps: Steps) -> None:
    log = MetricsLog(RunConfig(command=("train.py",), metric=metrics).metrics)
    log.read_line(line)
    assert log.steps == steps
    assert all("total_steps" not in record for record in log.records)


@pytest.mark.parametrize(
    ("lines", "step", "total"),
    [
        (["100/400 [00:01"], 100, 400),
        (["100/400 [00:01"], 101, 400),
        (["100/400 [00:01"], 99, 400),
        (["1000/9000 [00:01"], 1030, 9000),
        (["100/400 [00:01"], 50, None),
        (["100/400 [00:01"], 1100, None),
        (["4/400 [00:01"], 1, None),
        (["0/400 [00:01", "400/400 [00:01", "0/400 [00:01"], 401, None),
        (["Epoch 2/3", "100/400 [00:01"], 500, 1200),
        ([], 100, None),
    ],
    ids=[
        *("the same", "one more", "one less", "a slow bar", "steps of several batches", "a bar of a later epoch"),
        *("steps of several batches at first", "a bar that begins again", "a known epoch", "no bar"),
    ],
)
def test_total_of_a_bar_at_the_reported_step(lines: list[str], step: int, total: int | None) -> None:
    log = MetricsLog({})
    for line in lines:
        log.read_line(line)
    log.take_report({"step": step})
    assert log.steps == Steps(step, total)
    log.take_report({"step": step, "total": 5000})
    assert log.steps == Steps(step, 5000)


def test_seconds_left_count_down_to_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    assert sdk.seconds_left() == math.inf
    monkeypatch.setattr(sdk.time, "time", lambda: 1000.0)
    (tmp_path / sdk.DEADLINE).write_text("1030.5")
    assert sdk.seconds_left() == 30.5
    (tmp_path / sdk.DEADLINE).write_text("990")
    assert sdk.seconds_left() == 0.0


def test_sdk_does_nothing_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sdk.FOLDER_VARIABLE, raising=False)
    sdk.progress(1)
    sdk.log(loss=1.0)
    assert sdk.seconds_left() == math.inf


def test_sdk_refuses_non_numeric_values() -> None:
    with pytest.raises(ValueError, match="step: -1 is negative"):
        sdk.progress(-1)
    no_number: Any = "x"
    with pytest.raises(ValueError, match="could not convert"):
        sdk.log(loss=no_number)


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        ("loss: {number}", "loss: 7e-06", 7e-06),
        ("loss: {number}", "step 3  loss:   -0.25, lr 1", -0.25),
        ("loss: {number}", "val_loss: 3", None),
        ("loss: {number}", "loss: 1.", 1.0),
        ("loss: {number}", "{'loss': '5.811', 'epoch': '0.27'}", 5.811),
        ("loss: {number}", '{"loss": 5.811}', 5.811),
        ("'loss': {number}", "{'loss': '5.811'}", 5.811),
        ("loss={number}", "'loss'='5.8'", 5.8),
        ("loss: {number}", "loss: \x1b[1;36m5.8\x1b[0m", 5.8),
        ("loss: {number}", "\x1b[32mloss:\x1b[0m \x1b[1m5.8\x1b[0m", 5.8),
        ("loss: {number}", "lo\x1b[38;5;1mss: 5.8", 5.8),
        ("loss: {number}", "{'val_loss': '5.8'}", None),
        ("loss: {number}", "loss: 1.5.2", None),
        ("loss: {number}", "loss: 1,234.5", None),
        ("accuracy {number}%", "accuracy 97.31%", 97.31),
        ("{number} it/s", "54/100 [00:03, 12.5 it/s]", 12.5),
    ],
)
def test_number_in_a_text_is_read_whole(text: str, line: str, value: float | None) -> None:
    config = RunConfig(command=("train.py",), metric=(f"eval/top-1={text}",))
    log = MetricsLog(config.metrics)
    log.read_line(line)
    assert [record["eval/top-1"] for record in log.records] == ([] if value is None else [value])


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("wandb: 🚀 View run at https://wandb.ai/team/project/runs/abc", "https://wandb.ai/team/project/runs/abc"),
        ("wandb: 🚀 View run \x1b[33mfirst\x1b[0m at: \x1b[34mhttps://x.y/z\x1b[0m", "https://x.y/z"),
        ("wandb: ⭐️ View project at https://wandb.ai/team/project", None),
        (
            "🏃 View run first at: http://mlflow:5000/#/experiments/1/runs/2",
            "http://mlflow:5000/#/experiments/1/runs/2",
        ),
        ("COMET INFO: Experiment is live on comet.com https://comet.com/a/b", "https://comet.com/a/b"),
        ("see https://example.com", None),
    ],
)
def test_experiment_tracker_url_is_found(line: str, url: str | None) -> None:
    assert tracker_url(line) == url


def test_last_step_is_reported(tmp_path: Path) -> None:
    code = "import ray_on_ecs\nfor step in range(1, 501):\n    ray_on_ecs.progress(step)\n"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, sdk.FOLDER_VARIABLE: str(tmp_path)}, check=True)
    reports = (tmp_path / sdk.REPORTS).read_text().splitlines()
    assert json.loads(reports[-1]) == {"step": 500}
    assert len(reports) < 500
