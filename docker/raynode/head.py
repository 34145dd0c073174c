"""`ray-head`: the node that schedules, serves the dashboard and the Jobs API, and runs the jobs' drivers.

Arguments, such as --num-cpus=0, go to `ray start`.
"""

import os
import signal
import sys
import time

from raynode import address, api, metrics, ports, process

JOBS = f"http://127.0.0.1:{ports.DASHBOARD}/api/jobs/"
ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}
JOBS_SECONDS = 10.0
# The job's own limit, after which Ray kills it; by itself 3 s, too short for a driver to take leave of its workers.
JOB_LIMIT, JOB_LIMIT_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S", "8"
# Who follows a job's log sees its last line only after two looks, a second apart.
LAST_LINE_SECONDS = 2.5


def main() -> None:
    """Run `ray-head`."""
    process.node("ray-head", start)


def start() -> int:
    """Start the head and stay until it ends; its exit status."""
    os.environ.setdefault(JOB_LIMIT, JOB_LIMIT_SECONDS)
    metrics.start()
    # The dashboard listens on every interface: it is reached from the instance, and answers to the token alone.
    arguments = ["--head", f"--node-ip-address={address.own()}", "--dashboard-host=0.0.0.0", *ports.flags(ports.HEAD)]
    return process.ray_start("ray-head", [*arguments, *sys.argv[1:]], before_stop=stop_jobs)


def stop_jobs() -> signal.Signals:
    """Stop the jobs, which run here, so that each can say how it goes on; after some seconds drain all the same."""
    deadline = time.monotonic() + JOBS_SECONDS
    jobs = _running()
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


def _running() -> list[str]:
    """The submitted jobs that have not ended; none where the dashboard no longer answers."""
    try:
        jobs = api.get(JOBS)
    except OSError as cause:
        print(f"ray-head: the jobs are not known ({cause})", file=sys.stderr)
        return []
    return [job["submission_id"] for job in jobs if job["submission_id"] and job["status"] not in ENDED]
