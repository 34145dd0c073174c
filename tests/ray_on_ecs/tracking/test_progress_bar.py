import io
from typing import cast

from rich.console import Console

from ray_on_ecs.tracking.progress_bar import ProgressBar
from ray_on_ecs.tracking.run_actor import Progress
from ray_on_ecs.tracking.run_monitor import RunMonitor


class Monitor:
    """A run that has made 140 steps."""

    progress = Progress("workers", 140)


def shown(console: Console) -> str:
    with ProgressBar(cast(RunMonitor, Monitor()), console) as bar:
        bar.draw()
        bar._bar.refresh()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_bar_only_on_a_terminal() -> None:
    on_terminal = shown(Console(file=io.StringIO(), force_terminal=True, width=100))
    assert "running" in on_terminal
    assert "140/?" in on_terminal
    assert shown(Console(file=io.StringIO())) == ""
