"""usage: ray-health head|worker.

The containers' health check: exit status 0 if this Ray node is well, 1 with the reason if it isn't.
"""

import sys

from raynode import api, ports

# The head must take its own token. A worker's agent asks the head whether the head knows this node as alive.
URLS = {
    "head": f"http://127.0.0.1:{ports.DASHBOARD}/api/version",
    "worker": f"http://127.0.0.1:{ports.AGENT}/api/local_raylet_healthz",
}


def main() -> int:
    """Run `ray-health`."""
    if len(sys.argv) != 2 or sys.argv[1] not in URLS:
        print(__doc__, file=sys.stderr)
        return 2
    url = URLS[sys.argv[1]]
    try:
        api.get(url)
    except OSError as cause:
        print(f"ray-health: {url}: {cause}", file=sys.stderr)
        return 1
    return 0
