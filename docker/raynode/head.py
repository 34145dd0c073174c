"""`ray-head`: the node that schedules, serves the dashboard and the Jobs API, and runs the jobs' drivers.

Arguments, such as --num-cpus=0, go to `ray start`.
"""

import sys
import time

from raynode import address, api, ports, process

JOBS = f"http://127.0.0.1:{ports.DASHBOARD}/api/jobs/"
ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}
JOBS_SECONDS = 10.0


def main() -> None:
    """Run `ray-head`."""
    process.node("ray-head", start)


def start() -> int:
    """Start the head and stay until it ends; its exit status."""
    # The dashboard listens on every interface: it is reached from the instance, and answers to the token alone.
    arguments = ["--head", f"--node-ip-address={address.own()}", "--dashboard-host=0.0.0.0", *ports.flags(ports.HEAD)]
    return process.ray_start("ray-head", [*arguments, *sys.argv[1:]], before_stop=stop_jobs)


def stop_jobs() -> None:
    """Stop the jobs, which run here, so that each can say how it goes on; give up after some seconds."""
    deadline = time.monotonic() + JOBS_SECONDS
    try:
        for job in _running():
            print(f"ray-head: stopping job {job}", flush=True)
            api.post(f"{JOBS}{job}/stop")
        while _running() and time.monotonic() < deadline:
            time.sleep(0.5)
    except OSError as cause:
        print(f"ray-head: the jobs could not be stopped ({cause})", file=sys.stderr)


def _running() -> list[str]:
    return [job["submission_id"] for job in api.get(JOBS) if job["submission_id"] and job["status"] not in ENDED]
