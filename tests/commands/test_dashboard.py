"""A dashboard that hangs or crashes is restarted without effect on the head and its runs."""

import sys
from pathlib import Path

import psutil
import pytest

from tests.commands.head import SECONDS, commands, read_until
from tests.commands.ray_head import RayHead, ray_head
from tests.local_cluster import command_line, have_ended
from tests.waiting import until

# The command of the head, with shorter limits.
RAY = """
from ray_on_ecs.node import dashboard
dashboard.ASK_SECONDS, dashboard.HANG_SECONDS, dashboard.RETRY_SECONDS = 1, 10, 1
dashboard.main()
"""
SCRIPT = """
import pathlib, sys, time
print("begins", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
print("went on")
"""
pytestmark = pytest.mark.fault


def dashboard(head: RayHead) -> psutil.Process:
    """The main process of the head's dashboard, once it exists."""

    def find() -> list[psutil.Process]:
        return [process for process in head.processes if "dashboard/dashboard.py" in command_line(process)]

    [process] = until(find, SECONDS, head.log.read_text)
    return process


def test_failed_dashboard_is_restarted_without_effect_on_runs(environment: dict[str, str], tmp_path: Path) -> None:
    for name in ("state", "documents", "runs", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "wait.py").write_text(SCRIPT)
    go_on = tmp_path / "go-on"
    words = ("--num-workers", "1", "wait.py", str(go_on))
    with (
        ray_head(environment, tmp_path, ray=(sys.executable, "-c", RAY)) as head,
        commands("ray_on_ecs", head.shell, tmp_path / "code") as typed,
    ):
        before = typed("run", "--run-name=before", *words)
        read_until(before, "begins")
        hung = dashboard(head)
        hung.suspend()
        assert head.is_healthy, "a new head would cost every run a restart"
        during = typed("run", "--run-name=during", *words)
        read_until(during, "queued behind before")
        until(lambda: "the dashboard has not answered for" in head.log.read_text(), SECONDS, head.log.read_text)
        until(lambda: have_ended([hung]))
        until(lambda: head.state.ray, SECONDS, head.log.read_text)
        dashboard(head).kill()
        until(lambda: "the dashboard has ended with -9" in head.log.read_text(), SECONDS, head.log.read_text)
        go_on.touch()
        for process in (before, during):
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, out + err
            assert "went on" in out
        until(lambda: head.jobs == {"before": "SUCCEEDED", "during": "SUCCEEDED"}, SECONDS, head.log.read_text)
        assert head.process.poll() is None
        assert head.is_healthy
