"""usage: ray-health head|worker.

The containers' health check: exit status 0 if this Ray node is healthy, 1 with the reason if it isn't.
"""

import sys
import time
from contextlib import suppress

from raynode import api, ports


def urls(kind: str) -> list[str]:
    """Return the URLs that a healthy node answers.

    Head: the dashboard accepts our token, and the GCS is alive. Worker: its agent, which asks the head whether this
    raylet is dead; an unreachable head counts as "no". A worker outlives its head for a while and exits by itself if no
    head comes back: a replacement would only have to wait for a head as well.
    """
    here = "http://127.0.0.1"
    if kind == "head":
        return [f"{here}:{ports.DASHBOARD}/api/version", f"{here}:{ports.DASHBOARD}/api/gcs_healthz"]
    return [f"{here}:{ports.AGENT}/api/local_raylet_healthz"]


def wait_until_healthy(kind: str) -> None:
    """Return as soon as this node answers all of its health check's URLs."""
    while True:
        with suppress(OSError):
            for url in urls(kind):
                api.get(url)
            return
        time.sleep(1)


def main() -> int:
    """Run `ray-health`; return its exit status."""
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
