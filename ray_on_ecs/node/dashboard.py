"""`ray start --head --block` with a supervised dashboard: `python -m ray_on_ecs.node.dashboard start --head ...`.

When the dashboard crashes, Ray ends the head and all jobs with it; a dashboard that hangs, it does not notice. But jobs
run without the dashboard: it is needed only to submit, list or follow them.

`ray start` asks its node every second for processes that have ended. Only this module uses the private names of Ray for
that; tests/ray_on_ecs/node/test_dashboard.py checks that they exist.
"""

import logging
import math
import time
from contextlib import suppress
from typing import Any

import psutil
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD

from ray_on_ecs import logs
from ray_on_ecs.node import api

logger = logging.getLogger("ray_on_ecs.node.dashboard")  # the module is __main__

ASK_SECONDS, ANSWER_SECONDS = 15.0, 10.0  # it shares its CPU with drivers
# Time without an answer before a restart, once it has answered, and from its start, which is slow on a busy machine.
HANG_SECONDS = 90.0
START_SECONDS = 300.0
# Minimum time between two starts.
RETRY_SECONDS = 15.0

dead_processes = Node.dead_processes


class Supervisor:
    """Replacement of `Node.dead_processes` that restarts the dashboard and never reports it as dead."""

    def __init__(self) -> None:
        self._asked_at = self._started_at = self._silent_since = time.monotonic()
        self._limit = START_SECONDS

    def dead_processes(self, node: Node) -> list[Any]:
        """Return the dead processes except the dashboard, which is restarted if it has ended or hangs."""
        failure = self._failure(node)
        if failure and time.monotonic() - self._started_at >= RETRY_SECONDS:
            logger.warning(f"the dashboard {failure}; starting it again")
            self._restart(node)
        return [entry for entry in dead_processes(node) if entry[0] != PROCESS_TYPE_DASHBOARD]

    def _failure(self, node: Node) -> str | None:
        """Return the reason to restart the dashboard, or None."""
        processes = _dashboards(node)
        if not processes:
            return "has not started"
        [process] = processes
        if process.poll() is not None:
            return f"has ended with {process.returncode}"
        if time.monotonic() - self._asked_at < ASK_SECONDS:
            return None
        self._asked_at = time.monotonic()
        if _answers(node):
            self._silent_since = math.inf
            self._limit = HANG_SECONDS
            return None
        self._silent_since = min(self._silent_since, self._asked_at)
        silent = time.monotonic() - self._silent_since
        logger.debug(f"the dashboard has not answered for {silent:.0f} of {self._limit:.0f} s")
        return f"has not answered for {silent:.0f} s" if silent >= self._limit else None

    def _restart(self, node: Node) -> None:
        for process in _dashboards(node):
            _kill_tree(process.pid)
            process.wait()
        node.all_processes.pop(PROCESS_TYPE_DASHBOARD, None)
        try:
            node.start_api_server(include_dashboard=True, raise_on_failure=False)
        except Exception as cause:  # a full disk or a busy GCS: the head runs without a dashboard until the next try
            logger.warning(f"the dashboard does not start ({cause!r}); trying again")
        self._asked_at = self._started_at = self._silent_since = time.monotonic()
        self._limit = START_SECONDS


def _dashboards(node: Node) -> list[Any]:
    return [info.process for info in node.all_processes.get(PROCESS_TYPE_DASHBOARD, [])]


def _answers(node: Node) -> bool:
    """Return True if the dashboard and its Jobs API answer.

    Not at `node.webui_url`: on a head that was restored elsewhere from its state, that is the previous head's address.
    """
    try:
        api.ask(f"http://127.0.0.1:{node._ray_params.dashboard_port}/api/version", ANSWER_SECONDS)
    except OSError:
        return False
    return True


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants, which may hold its port."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def main() -> None:
    """Run Ray's command `ray` with this process's arguments."""
    from ray.scripts import scripts  # takes half a second, which tests of other parts need not wait

    logs.set_up("ray-head", errors_from=logging.WARNING)
    supervisor = Supervisor()
    Node.dead_processes = lambda self: supervisor.dead_processes(self)
    scripts.main()


if __name__ == "__main__":
    main()
