"""Curves of a run's metrics: which records they have, of small and large files, and of files that others wrote."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import curves
from ray_on_ecs.tracking.curves import Curves, sample, thin
from ray_on_ecs.tracking.records import read_records

RESULT = layout.RESULT


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "mine")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files above 2,000 bytes are large."""
    monkeypatch.setattr(curves, "WHOLE_BYTES", 2000)
    monkeypatch.setattr(curves, "SLICES", 5)
    monkeypatch.setattr(curves, "SLICE_BYTES", 400)


def records(steps: Iterable[int], **metrics: Any) -> list[dict[str, Any]]:
    """A record for each step; a metric has the value, or that of a function of the step."""
    rows = [{"step": step, "time": f"2026-11-01T00:{step // 60 % 60:02}:{step % 60:02}+00:00"} for step in steps]
    return [
        row | {key: value(row["step"]) if callable(value) else value for key, value in metrics.items()} for row in rows
    ]


def read(storage: RunStorage, **options: Any) -> Curves:
    return thin(sample(storage, storage.listing().files, **options), 10_000)


def test_thinned_curve_keeps_both_ends() -> None:
    plot = thin(records(range(1, 1001), loss=lambda step: 1 / step), 50)
    assert (plot.steps[0], plot.steps[-1], len(plot.steps)) == (1, 1000, 50)
    gaps = {after - before for before, after in zip(plot.steps, plot.steps[1:], strict=False)}
    assert gaps <= {20, 21}
    assert plot.values["loss"][:2] == [1, 0.04762]
    assert plot.seconds[:2] == [0, 20]


def test_rare_metric_keeps_its_points() -> None:
    rows = records(range(1000), loss=1.0)
    for row in rows[99::100]:
        row["val_loss"] = row["step"] / 1000
    plot = thin(rows, 20)
    values = dict(zip(plot.steps, plot.values["val_loss"], strict=True))
    assert {step: value for step, value in values.items() if value is not None} == {
        step: step / 1000 for step in range(99, 1000, 100)
    }
    assert len(plot.steps) <= 30


def test_losses_are_among_the_curves_of_many_metrics() -> None:
    plot = thin(records([1], **{f"layer_{number}": 1.0 for number in range(40)}, Val_Loss=0.5), 10)
    assert len(plot.values) == curves.MAX_CURVES
    assert plot.values["Val_Loss"] == [0.5]


@pytest.mark.parametrize("value", [None, sys.float_info.max, pytest.param(10**400, id="huge"), "1", [1], {}, True])
def test_value_that_is_not_a_finite_number_is_not_a_point(value: Any) -> None:
    plot = thin([*records([1, 2], loss=0.5), *records([3], loss=value)], 10)
    assert plot.values["loss"][:2] == [0.5, 0.5]
    assert plot.values["loss"][2:] in ([], [None])
    json.dumps(plot.__dict__, allow_nan=False)


def test_last_value_that_was_not_finite_is_known() -> None:
    assert thin([*records([1], loss=0.5, lr=0.1), *records([2], loss=None)], 10).last == {"loss": None, "lr": 0.1}


@pytest.mark.parametrize(
    "line",
    ["{", "7", "[1]", '{"loss": 1}', '{"step": "2", "loss": 1}', '{"step": true, "loss": 1}', "[" * 10**5, "\xff"],
)
def test_broken_line_costs_its_record_alone(storage: RunStorage, line: str) -> None:
    good = [json.dumps(row) for row in records([1, 3], loss=0.5)]
    storage.write(layout.METRICS, "\n".join([good[0], line, good[1], ""]).encode("latin-1"))
    assert read(storage).steps == [1, 3]


@pytest.mark.parametrize("time", ["yesterday", None, [], "0001-01-01T00:00:00+00:00"])
def test_record_without_a_time_has_its_step(time: Any) -> None:
    rows = records([1, 2], loss=0.5)
    rows[1]["time"] = time
    plot = thin(rows, 10)
    assert (plot.steps, plot.seconds) == ([1, 2], [0, None])


@pytest.mark.usefixtures("small_slices")
def test_slices_of_a_large_file_are_whole_records(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = records(range(1, 2001), loss=lambda step: 1 / step)
    storage.write_lines(layout.METRICS, rows)
    storage.write_json(RESULT, {})
    sizes = []
    whole_read = storage.store.read

    def counted_read(*given: Any) -> bytes:
        sizes.append(len(content := whole_read(*given)))
        return content

    monkeypatch.setattr(type(storage.store), "read", lambda self, *given: counted_read(*given))
    plot = read(storage)
    assert sum(sizes) == curves.WHOLE_BYTES
    assert (plot.steps[0], plot.steps[-1]) == (1, 2000)
    assert plot.steps == sorted(set(plot.steps))
    assert any(900 < step < 1100 for step in plot.steps)
    assert len(read(storage, is_whole=True).steps) == 2000


# Steps in `metrics.jsonl`, and those in the parts, which begin at an index.
STORIES = {
    "first attempt": ([], {0: range(1, 5), 5000: range(5, 9)}),
    "merged": (range(1, 9), {}),
    "resumed at the end": (range(1, 5), {4: range(5, 9)}),
    "resumed before the end": (range(1, 9), {4: range(5, 7)}),
    "merged, and its parts not deleted": (range(1, 9), {0: range(1, 5), 4: range(5, 9)}),
    "merged, and the last part not deleted": (range(1, 9), {4: range(5, 9)}),
}


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("is_large", [False, True])
def test_parts_replace_merged_records(
    storage: RunStorage, monkeypatch: pytest.MonkeyPatch, story: str, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(curves, "WHOLE_BYTES", 100)
    merged, parts = STORIES[story]
    storage.write_lines(layout.METRICS, records(merged, loss=1.0))
    for number, steps in parts.items():
        storage.write_lines(f"{layout.METRICS_PARTS}/{number:09}.jsonl", records(steps, loss=0.5))
    assert read(storage).steps == [record["step"] for record in read_records(storage)]


def test_file_that_is_gone_is_left_out(storage: RunStorage) -> None:
    storage.write_lines(layout.METRICS, records([1, 2], loss=0.5))
    files = storage.listing().files
    storage.delete(layout.METRICS)
    assert sample(storage, files) == []
