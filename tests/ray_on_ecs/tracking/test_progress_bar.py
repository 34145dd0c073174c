import io
from typing import Any, cast

import pytest
from rich.console import Console

from ray_on_ecs.tracking import progress_bar
from ray_on_ecs.tracking.progress_bar import ProgressBar
from ray_on_ecs.tracking.run_actor import Progress
from ray_on_ecs.tracking.run_monitor import RunMonitor


class Monitor:
    """A run that is in the middle of the second of three epochs."""

    def __init__(self) -> None:
        self.progress = Progress(1, 40, 100, "workers", 140, None)
        self.history: list[Any] = [{"loss": 1.5}]


def shown(console: Console, epochs: int | None = 3) -> str:
    with ProgressBar(cast(RunMonitor, Monitor()), console, epochs, lambda metrics: f"loss {metrics['loss']}") as bar:
        bar.draw()
        bar.draw()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "LINE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_a_log_says_where_a_long_epoch_is() -> None:
    lines = shown(Console(file=io.StringIO())).splitlines()
    assert lines[0] == "loss 1.5", "once"
    assert [line for line in lines[1:] if line] == ["epoch 2/3  step 140 of 300"] * 2


def test_but_not_all_the_time() -> None:
    assert "step" not in shown(Console(file=io.StringIO()))


@pytest.mark.usefixtures("no_pause")
def test_a_terminal_has_a_bar_and_a_script_its_own_lines() -> None:
    on_terminal = shown(Console(file=io.StringIO(), force_terminal=True, width=100))
    assert "step" not in on_terminal
    assert "step" not in shown(Console(file=io.StringIO()), epochs=None)
