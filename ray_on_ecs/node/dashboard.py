"""`ray start --head --block` with a supervised dashboard: `python -m ray_on_ecs.node.dashboard start --head ...`.

Ray ends the whole head, and with it all jobs, when its dashboard crashes, and leaves one alone that hangs. But jobs run
without it; only who submits, lists or follows one needs it.

This module alone uses private names of Ray for that: `ray start` asks its node every second which of its processes
have ended. tests/ray_on_ecs/node/test_dashboard.py holds that the names exist.
"""

import math
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD
from ray.scripts import scripts

from ray_on_ecs.node import api

ASK_SECONDS = 15.0
ANSWER_SECONDS = 10.0
# From the first question that it leaves unanswered; and from its start to its first answer, which takes long on a busy
# machine.
HANG_SECONDS = 90.0
START_SECONDS = 300.0
# Between two starts, in case that it ends at once.
RETRY_SECONDS = 15.0

dead_processes = Node.dead_processes


class Supervisor:
    """Stands in for Ray's question which processes of the head's node have ended, and never names the dashboard."""

    def __init__(self) -> None:
        self._asked_at = self._started_at = self._silent_since = time.monotonic()
        self._limit = START_SECONDS

    def dead_processes(self, node: Node) -> list[Any]:
        """Return the processes that have ended except the dashboard, which is started again if it has, or hangs."""
        if (why := self._failure(node)) and time.monotonic() - self._started_at >= RETRY_SECONDS:
            print(f"ray-head: the dashboard {why}; starting it again", file=sys.stderr, flush=True)
            self._restart(node)
        return [each for each in dead_processes(node) if each[0] != PROCESS_TYPE_DASHBOARD]

    def _failure(self, node: Node) -> str | None:
        """Return why the dashboard has to be started again, or None."""
        [process] = _dashboards(node) or [None]
        if process is None or process.poll() is not None:
            return "has not started" if process is None else f"has ended with {process.returncode}"
        if time.monotonic() - self._asked_at < ASK_SECONDS:
            return None
        self._asked_at = time.monotonic()
        if _answers(node):
            self._silent_since, self._limit = math.inf, HANG_SECONDS
            return None
        self._silent_since = min(self._silent_since, self._asked_at)
        silent = time.monotonic() - self._silent_since
        return f"has not answered for {silent:.0f} s" if silent >= self._limit else None

    def _restart(self, node: Node) -> None:
        for process in _dashboards(node):
            _kill_tree(process.pid)
            process.wait()
        node.all_processes.pop(PROCESS_TYPE_DASHBOARD, None)
        try:
            node.start_api_server(include_dashboard=True, raise_on_failure=False)
        except Exception as cause:  # a full disk, a busy GCS: the head goes on without a dashboard for a while
            print(f"ray-head: the dashboard does not start ({cause!r}); trying again", file=sys.stderr, flush=True)
        self._asked_at = self._started_at = self._silent_since = time.monotonic()
        self._limit = START_SECONDS


def _dashboards(node: Node) -> list[Any]:
    return [each.process for each in node.all_processes.get(PROCESS_TYPE_DASHBOARD, [])]


def _answers(node: Node) -> bool:
    """Return whether the dashboard and its Jobs API answer.

    Not at `node.webui_url`: on a head that has come back elsewhere with its state, that is the previous head's.
    """
    try:
        api.get(f"http://127.0.0.1:{node._ray_params.dashboard_port}/api/version", ANSWER_SECONDS)
    except OSError:
        return False
    return True


def _kill_tree(pid: int) -> None:
    """Kill a process, whatever state it is in, and its descendants, which may hold its port."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def main() -> None:
    """Run Ray's command `ray` with this process's arguments."""
    supervisor = Supervisor()
    Node.dead_processes = lambda self: supervisor.dead_processes(self)
    scripts.main()


if __name__ == "__main__":
    main()
