"""usage: ray-health head|worker.

The containers' health check: exit status 0 if this Ray node is healthy, 1 with the reason if it isn't.
"""

import sys

from ray_on_ecs.node import api, gcs, ports


def check(kind: str) -> None:
    """Return if this node is healthy.

    Head: the GCS alone decides, because nothing runs without it. A dashboard that hangs is started again by
    `ray_on_ecs.node.dashboard`, and no run needs it: a new head would cost each of them a restart. Worker: its agent,
    which asks the head whether this raylet is dead; an unreachable head counts as "no". A worker outlives its head for
    a while and exits by itself if no head comes back: a replacement would only have to wait for a head as well.

    Raises:
        OSError: It isn't.
    """
    if kind == "head":
        gcs.check(gcs.own_address())
        return
    url = f"http://127.0.0.1:{ports.AGENT}/api/local_raylet_healthz"
    try:
        api.get(url)
    except OSError as cause:
        raise OSError(f"{url}: {cause}") from cause


def main() -> int:
    """Run `ray-health`; return its exit status."""
    if sys.argv[1:] not in (["head"], ["worker"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        check(sys.argv[1])
    except OSError as cause:
        print(f"ray-health: {cause}", file=sys.stderr)
        return 1
    return 0
