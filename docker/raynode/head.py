"""`ray-head`: the node that schedules, serves the dashboard and the Jobs API, and runs the jobs' drivers.

Arguments, such as --num-cpus=0, go to `ray start`. With RAY_HEAD_STATE it takes up the state of the head before it.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from raynode import address, api, health, metrics, ports, process, state

JOBS = f"http://127.0.0.1:{ports.DASHBOARD}/api/jobs/"
ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}
JOBS_SECONDS = 10.0
# The job's own limit, after which Ray kills it; by itself 3 s, too short for a driver to take leave of its workers.
JOB_LIMIT, JOB_LIMIT_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S", "8"
# Who follows a job's log sees its last line only after two looks, a second apart.
LAST_LINE_SECONDS = 2.5
LOST_SECONDS, LOST_SECONDS_BETWEEN = 120.0, 2.0


def main() -> None:
    """Run `ray-head`."""
    process.node("ray-head", start)


def start() -> int:
    """Start the head and stay until it ends; its exit status."""
    os.environ.setdefault(JOB_LIMIT, JOB_LIMIT_SECONDS)
    if kept := state.opened():
        os.environ.update(kept.variables)
        threading.Thread(target=take_up, args=(kept, time.time()), name="state", daemon=True).start()
    metrics.start()
    # The dashboard listens on every interface: it is reached from the instance, and answers to the token alone.
    arguments = ["--head", f"--node-ip-address={address.own()}", "--dashboard-host=0.0.0.0", *ports.flags(ports.HEAD)]
    return process.ray_start("ray-head", [*arguments, *sys.argv[1:]], before_stop=stop_jobs)


def stop_jobs() -> signal.Signals:
    """Stop the jobs, which run here, so that each can say how it goes on; after some seconds drain all the same."""
    deadline = time.monotonic() + JOBS_SECONDS
    jobs = [job["submission_id"] for job in _running()]
    for job in jobs:
        print(f"ray-head: stopping job {job}", flush=True)
        try:
            api.post(f"{JOBS}{job}/stop")
        except OSError as cause:
            print(f"ray-head: job {job} could not be stopped ({cause})", file=sys.stderr)
    while _running() and time.monotonic() < deadline:
        time.sleep(0.5)
    if jobs:
        time.sleep(LAST_LINE_SECONDS)
    return signal.SIGTERM


def take_up(kept: state.State, began: float) -> None:
    """Once Ray is up, end the jobs of the head before; the state is sound when the head is well after that."""
    _wait_until_well()
    end_lost_jobs(began)
    _wait_until_well()
    kept.settle()


def end_lost_jobs(began: float) -> None:
    """Have Ray see that jobs from before this head, `began` in Unix time, have no driver any more: they went with it.

    By itself it looks only when the next job is submitted, and would show them as running until then.
    """
    deadline, told = time.monotonic() + LOST_SECONDS, set[str]()
    while (lost := _lost(began)) and time.monotonic() < deadline:
        for job in lost:
            if job not in told:
                print(f"ray-head: job {job} has ended with the head that it ran on", flush=True)
                told.add(job)
            with suppress(OSError):  # what would end it is not up yet, or takes its time
                api.post(f"{JOBS}{job}/stop")
        time.sleep(LOST_SECONDS_BETWEEN)


def _lost(began: float) -> list[str]:
    return [job["submission_id"] for job in _running() if (job.get("start_time") or 0) < 1000 * began]


def _wait_until_well() -> None:
    while True:
        with suppress(OSError):
            for url in health.urls("head"):
                api.get(url)
            return
        time.sleep(1)


def _running() -> list[dict[str, Any]]:
    """The submitted jobs that have not ended; none where the dashboard no longer answers."""
    try:
        jobs = api.get(JOBS)
        return [job for job in jobs if job["submission_id"] and job["status"] not in ENDED]
    except (OSError, KeyError, TypeError) as cause:  # also an answer that is not one of Ray's
        print(f"ray-head: the jobs are not known ({cause})", file=sys.stderr)
        return []
