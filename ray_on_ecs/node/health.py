"""Health check of the containers: exit status 0 if this Ray node is healthy, 1 with the reason if it isn't."""

import argparse
import logging

from ray_on_ecs import logs
from ray_on_ecs.errors import GpuError, NodeError
from ray_on_ecs.node import api, gpus, ports

logger = logging.getLogger(__name__)


def main() -> int:
    """Run `ray-health`; return its exit status.

    Head: only the GCS decides, because the cluster can't run without it. `ray_on_ecs.node.dashboard` restarts a
    dashboard that hangs, and a run doesn't need it, whereas a new head would restart every run.

    Worker: its agent, which asks the head whether this raylet is dead; an unreachable head counts as "no". A worker
    waits for a new head for a while and exits if there is none: a replacement would have to wait, too. A worker that
    can't open its GPUs is unhealthy, unless a process still has one open: its training may continue, for example after
    systemd has reloaded its units on the host.
    """
    logs.set_up("ray-health", errors_from=logging.WARNING)
    parser = argparse.ArgumentParser(prog="ray-health", description=__doc__)
    parser.add_argument("kind", choices=("head", "worker"))
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs that the task requested (%(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.kind == "head":
            api.check_gcs(ports.own_gcs())
        else:
            api.ask(f"http://127.0.0.1:{ports.AGENT}/api/local_raylet_healthz")
            fault = gpus.driver_error(gpus.load_driver(), arguments.num_gpus) if arguments.num_gpus else None
            if fault and not gpus.are_in_use():
                raise GpuError(fault)
            if fault:
                logger.warning(f"{fault}; a process still uses a GPU")
    except (NodeError, OSError) as cause:
        logger.error(cause)
        return 1
    return 0
