"""What the benchmarks make of their measurements."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import drills, goal, gpu, report, saving, scaling, wire
from bench.report import Finding
from bench.runs import BenchmarkError


def reference(*accuracies: float) -> list[dict[str, Any]]:
    return [{"seconds": 10.0, "test_accuracy": each} for each in accuracies]


def ours(*accuracies: float) -> list[dict[str, Any]]:
    return [{"train_seconds": 4.0, "test_seconds": 1.0, "test_accuracy": each} for each in accuracies]


def test_the_goal_is_the_mean_of_the_reference_s_final_accuracies() -> None:
    found = goal.finding([reference(0.5, 0.9, 0.8), reference(0.5, 0.6, 0.7)], [ours(0.74, 0.76), ours(0.8, 0.9)])
    assert found.data["goal"] == pytest.approx(0.75)
    assert found.ratio == pytest.approx(30 / 7.5), "30 s beside the median of 10 and 5 s"
    assert found.reached, "at least 3 times"
    assert "first passes it in epoch 2, none" in found.note, "that the reference passed it before its end is told"
    assert "the ratio would be 3.3" in found.note, "20 and 30 s beside 7.5 s"


def test_a_seed_that_misses_the_goal_fails_it() -> None:
    found = goal.finding([reference(0.8)] * 2, [ours(0.9), ours(0.7)])
    assert found.reached is False, "the other seed's speed doesn't count"
    assert "1 of 2" in found.note


def test_nothing_that_reaches_the_goal_is_no_ratio_that_passes() -> None:
    assert goal.finding([reference(0.8)], [ours(0.7)]).reached is False


def test_half_of_the_bytes_reach_the_target_and_all_of_them_do_not() -> None:
    assert wire.traffic({"fp32": 100.0, "bf16": 50.0}).reached
    assert wire.traffic({"fp32": 100.0, "bf16": 100.0}).reached is False


def test_points_lost_are_counted_seed_by_seed() -> None:
    found = wire.accuracy("resnet18", [0.80, 0.82], [0.79, 0.82])
    assert found.ratio == pytest.approx(0.5)
    assert found.reached is False, "0.3 points are allowed"
    assert "+1.00, +0.00" in found.note


def test_scaling_is_a_share_of_twice_one_worker_s_rate() -> None:
    assert scaling.finding(128, [100.0, 90.0], [170.0, 160.0], 0.1).ratio == pytest.approx(0.85)


def test_a_gpu_that_is_not_there_is_told_and_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kernels, found = gpu.measure(None)  # ty: ignore[invalid-argument-type]
    assert kernels.data["ours"] < 1.5 * kernels.data["reference"], "they can be counted anywhere"
    assert (found.ratio, found.reached) == (None, None)


def test_the_table_says_what_was_reached_and_what_not() -> None:
    findings = [
        Finding(name="fast", reference="1", ours="2", **report.at_least(2, 1)),
        Finding(name="small", reference="1", ours="2", **report.at_most(2, 1)),
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table([report.document("both", findings, (0, 1), "some data")]))
    text = console.export_text()
    assert "at least 1: yes" in text
    assert "at most 1: no" in text
    assert "torch" in text, "a result carries what it depends on"
    assert "some data, seeds 0, 1" in text


def test_a_part_that_is_measured_again_keeps_the_others_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name in ("second", "first", "second"):
        found = Finding(name=f"{name} thing", reference="1", ours="2", **report.at_least(2, 1))
        report.write(report.document(name, [found], (0,), "data"), ["first", "second"])
    text = (tmp_path / "table.txt").read_text()
    assert 0 < text.index("first thing") < text.index("second thing")
    assert text.count("second thing") == 1


def test_a_checkpoint_costs_what_training_stands_and_what_it_is_slower() -> None:
    # Two steps of 1.2 s beside the storing, eight of 1 s, after 0.1 s to copy the state.
    moments = [0.0, 1.2, 2.4, *(3.4 + n for n in range(8))]
    cost = saving.Seen(0.1, moments, [True, True, *[False] * 9]).cost()
    assert cost == {"stood": 0.1, "slower": pytest.approx(0.4), "stored": 2.4}
    found = saving.finding([10.0, 20.0, 30.0], [cost] * 3)
    assert found.ratio == pytest.approx(100 * 0.5 / 20)
    assert found.reached is False, "at most 2 %"
    assert "stands 100 ms" in found.note


def test_a_checkpoint_that_is_stored_as_long_as_is_trained_can_be_held_against_nothing() -> None:
    with pytest.raises(BenchmarkError, match="longer than half an epoch"):
        saving.Seen(0.1, [0.0, 1.0, 2.0], [True, True, True]).cost()


def test_the_drills_table_says_which_run_did_not_end_as_it_should() -> None:
    good = drills.Drill(1, [3, 9], ended=True, same=True, stood=[10.0, 20.0], repeated=1)
    bad = drills.Drill(1, [3], ended=True, same=False, stood=[], repeated=0)
    console = Console(width=120, file=io.StringIO())
    console.print(drills.table({"worker killed": good, "raylet killed": bad}))
    lines = console.file.getvalue().splitlines()  # ty: ignore[missing-attribute]
    assert any("worker killed" in line and "15 (10 to 20)" in line and "NO" not in line for line in lines)
    assert any("raylet killed" in line and "NO" in line for line in lines)
