"""usage: ray-health head|worker.

The containers' health check: exit status 0 if this Ray node is well, 1 with the reason if it isn't.
"""

import os
import sys

from raynode import api, ports


def urls(kind: str) -> list[str]:
    """What must answer: a head takes its own token and its GCS lives; the head knows a worker as alive.

    The worker's agent asks the head, and takes silence for an answer; the head is therefore asked, too.
    """
    here, head = "http://127.0.0.1", f"http://{os.environ.get('RAY_HEAD_HOST')}"
    if kind == "head":
        return [f"{here}:{ports.DASHBOARD}/api/version", f"{here}:{ports.DASHBOARD}/api/gcs_healthz"]
    return [f"{here}:{ports.AGENT}/api/local_raylet_healthz", f"{head}:{ports.DASHBOARD}/api/gcs_healthz"]


def main() -> int:
    """Run `ray-health`."""
    if sys.argv[1:] not in (["head"], ["worker"]):
        print(__doc__, file=sys.stderr)
        return 2
    for url in urls(sys.argv[1]):
        try:
            api.get(url)
        except OSError as cause:
            print(f"ray-health: {url}: {cause}", file=sys.stderr)
            return 1
    return 0
