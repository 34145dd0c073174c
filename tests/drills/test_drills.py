"""Tables of the drills' measurements."""

import io

import pytest
from rich.console import Console

from drills.__main__ import Drill, pauses, table


def test_table_marks_a_run_with_other_weights() -> None:
    good = Drill(2, ended=True, same_weights=True, pauses=[10.0, 20.0], repeated_steps=1)
    bad = Drill(1, ended=True, same_weights=False)
    console = Console(width=120, file=io.StringIO())
    console.print(table({"worker-killed": good, "raylet-killed": bad}))
    lines = console.file.getvalue().splitlines()  # ty: ignore[missing-attribute]
    assert any("worker-killed" in line and "15 (10 to 20)" in line and "NO" not in line for line in lines)
    assert any("raylet-killed" in line and "NO" in line for line in lines)


def test_pause_begins_at_disturbance_or_step() -> None:
    # Steps at 1 and 2 s, none for 20 s after a last one at 3.5 s.
    steps = [1.0, 2.0, 3.5, 23.5, 24.0]
    assert pauses(steps, [3.0]) == pytest.approx([20.0])


def test_disturbed_pause_counts_to_its_end() -> None:
    steps = [1.0, 2.0, 40.0, 41.0, 50.0]
    assert pauses(steps, [3.0, 20.0, 42.0]) == pytest.approx([37.0, 20.0, 8.0])


def test_no_pause_after_the_last_step() -> None:
    assert pauses([1.0, 2.0], [3.0]) == [0.0]
