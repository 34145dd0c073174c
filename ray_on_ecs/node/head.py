"""`ray-head`: the cluster's head, with scheduler, dashboard, Jobs API and the jobs' drivers.

Arguments, such as --num-cpus=0, go to `ray start`. With RAY_HEAD_STATE it restores the state of the previous head.
"""

import os
import sys

from ray_on_ecs.node import labels, metrics, ports, process, protection, state
from ray_on_ecs.node.jobs import JOB_LIMIT, JOB_LIMIT_SECONDS, JobRecovery, any_under_way

# `ray` with a supervised dashboard. -P: without the working directory, to which jobs write, on sys.path.
RAY = (sys.executable, "-P", "-m", "ray_on_ecs.node.dashboard")


def main() -> None:
    """Run `ray-head`."""
    process.run_node("ray-head", start)


def start() -> int:
    """Start the head and run until it ends; return its exit status."""
    os.environ.setdefault(JOB_LIMIT, JOB_LIMIT_SECONDS)
    head_state = state.open_state()
    if head_state:
        os.environ.update(head_state.variables)
    jobs = JobRecovery(head_state)
    jobs.start()
    metrics.start()
    # Ray doesn't count the CPUs of drivers, so the head's jobs decide.
    protection.start(any_under_way)
    # On every interface: Session Manager forwards to it from the instance, and it requires the token.
    arguments = [
        "--head",
        f"--node-ip-address={ports.default_address()}",
        "--dashboard-host=0.0.0.0",
        *labels.flags(),
        *ports.flags(ports.HEAD),
    ]
    return process.ray_start([*arguments, *sys.argv[1:]], before_stop=jobs.stop_jobs, ray=RAY)
