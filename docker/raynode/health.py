"""usage: ray-health head|worker.

The containers' health check: exit status 0 if this Ray node is well, 1 with the reason if it isn't.
"""

import sys

from raynode import api, ports


def urls(kind: str) -> list[str]:
    """What must answer: a head takes its own token and its GCS lives; the head doesn't know a worker as dead.

    The worker's agent asks the head, and takes silence for yes. A worker outlives its head for a while, and ends by
    itself if none comes back: replaced at once, it would only wait for a head again.
    """
    here = "http://127.0.0.1"
    if kind == "head":
        return [f"{here}:{ports.DASHBOARD}/api/version", f"{here}:{ports.DASHBOARD}/api/gcs_healthz"]
    return [f"{here}:{ports.AGENT}/api/local_raylet_healthz"]


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
