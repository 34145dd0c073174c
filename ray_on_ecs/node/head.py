"""`ray-head`: the cluster's head, with scheduler, dashboard and the desk that starts the drivers of runs.

Arguments, such as --num-cpus=0, go to `ray start`. With RAY_HEAD_STATE it restores the state of the previous head.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ray_on_ecs.contract import DOCUMENTS_VARIABLE
from ray_on_ecs.jobs.documents import Documents
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED
from ray_on_ecs.node import api, idle, labels, metrics, ports, process, protection, ray_status, scaling, state
from ray_on_ecs.node.desk import Desk
from ray_on_ecs.node.drivers import of_head
from ray_on_ecs.node.idle import Idle, Sleep
from ray_on_ecs.storage.filesystem import open_filesystem

# `ray` with a supervised dashboard. -P: without the working directory, to which jobs write, on sys.path.
RAY = (sys.executable, "-P", "-m", "ray_on_ecs.node.dashboard")


def main() -> None:
    """Run `ray-head`."""
    process.run_node("ray-head", start)


def start() -> int:
    """Start the head and run until it ends; return its exit status."""
    head_state, is_up = state.open_state(), threading.Event()
    if head_state:
        os.environ.update(head_state.variables)
    threading.Thread(target=_wait_for_ray, args=(head_state, is_up), name="start", daemon=True).start()
    jobs = of_head()
    wake = idle.wake_of_environment()
    sleep = Sleep(wake, Idle(), partial(metrics.request_head, wake)) if wake else None
    before_stop = _start_desk(jobs, is_up, sleep)
    metrics.start(sleep.idle if sleep else None)
    if sleep:
        idle.start(sleep.idle, partial(any_under_way, jobs), is_up)
    scaling.start(jobs.list_jobs, is_up)
    # Ray doesn't count the CPUs of drivers, so the head's jobs decide.
    protection.start(lambda: any_under_way(jobs))
    # On every interface: Session Manager forwards to it from the instance, and it requires the token.
    arguments = [
        "--head",
        f"--node-ip-address={ports.default_address()}",
        "--dashboard-host=0.0.0.0",
        *labels.flags(),
        *ports.flags(ports.HEAD),
    ]
    return process.ray_start([*arguments, *sys.argv[1:]], before_stop=before_stop, ray=RAY)


def any_under_way(jobs: MachineJobs) -> bool:
    """Return True if a run is under way, or another job of Ray, such as a driver that was started in a shell."""
    url = f"http://127.0.0.1:{ports.DASHBOARD}/api/jobs/"
    lists = (jobs.list_jobs, lambda: api.items_in(url, api.ask(url), api.JOB))
    return any(job["status"] not in ENDED for listed in lists for job in listed())


def _start_desk(jobs: MachineJobs, is_up: threading.Event, sleep: Sleep | None) -> Callable[[], signal.Signals]:
    """Start the desk if the container names the cluster's documents; return what ends the jobs before the head."""
    address = os.environ.get(DOCUMENTS_VARIABLE)
    if not address:
        return lambda: signal.SIGTERM
    desk = Desk(Documents(*open_filesystem(address)), jobs, ray_status.read, is_up.is_set, sleep)
    desk.start()
    return desk.stop_jobs


def _wait_for_ray(head_state: state.State | None, is_up: threading.Event) -> None:
    """Wait until the dashboard answers and reports the GCS as alive: a head can start with this state."""
    while True:
        with suppress(OSError):
            for endpoint in ("version", "gcs_healthz"):
                api.ask(f"http://127.0.0.1:{ports.DASHBOARD}/api/{endpoint}")
            if head_state:
                head_state.mark_healthy()
            is_up.set()
            return
        time.sleep(1)
