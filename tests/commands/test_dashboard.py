"""A dashboard that hangs or crashes is restarted without effect on the head and its jobs."""

import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands.head import SECONDS
from tests.commands.ray_head import RayHead, ray_head
from tests.local_cluster import command_line
from tests.waiting import until

# The command of the head, with shorter limits.
RAY = """
from ray_on_ecs.node import dashboard
dashboard.ASK_SECONDS, dashboard.HANG_SECONDS, dashboard.RETRY_SECONDS = 1, 10, 1
dashboard.main()
"""
JOB = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
print("went on")
"""
# The first call of `ray-on-ecs run` on a head.
CONNECT = """
from ray_on_ecs.cluster.clusters import HeadCluster
with HeadCluster().connect_when_up(print):
    print("connected")
"""
pytestmark = pytest.mark.fault


def dashboard(head: RayHead) -> psutil.Process:
    """The main process of the head's dashboard, once it exists."""

    def find() -> list[psutil.Process]:
        return [each for each in head.processes if "dashboard/dashboard.py" in command_line(each)]

    [process] = until(find, SECONDS, head.log.read_text)
    return process


def status(head: RayHead) -> str | None:
    """The status of its job; None while the dashboard doesn't answer."""
    try:
        return head.jobs.get("mine")
    except (OSError, RuntimeError):
        return None


def test_failed_dashboard_is_restarted_without_effect_on_jobs(environment: dict[str, str], tmp_path: Path) -> None:
    for name in ("state", "runs"):
        (tmp_path / name).mkdir()
    go_on = tmp_path / "go-on"
    with ray_head(environment, tmp_path, ray=(sys.executable, "-c", RAY)) as head:
        entrypoint = shlex.join(["python", "-c", JOB, str(go_on)])
        head.client.submit_job(entrypoint=entrypoint, submission_id="mine")
        until(lambda: status(head) == "RUNNING", SECONDS, head.log.read_text)

        hung = dashboard(head)
        hung.suspend()
        assert head.is_healthy, "a new head would cost every run a restart"
        command = [sys.executable, "-c", CONNECT]
        variables = {**head.environment, "RAY_API_SERVER_ADDRESS": head.dashboard}
        connecting = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        until(lambda: "the dashboard has not answered for" in head.log.read_text(), SECONDS, head.log.read_text)
        assert until(lambda: status(head), SECONDS, head.log.read_text) == "RUNNING"
        assert not hung.is_running()
        said, _ = connecting.communicate(timeout=SECONDS)
        assert said.splitlines()[-1:] == ["connected"], said

        dashboard(head).kill()
        until(lambda: "the dashboard has ended with -9" in head.log.read_text(), SECONDS, head.log.read_text)
        go_on.touch()
        until(lambda: status(head) == "SUCCEEDED", SECONDS, head.log.read_text)
        assert "went on" in head.client.get_job_logs("mine")
        assert head.process.poll() is None
        assert head.is_healthy
