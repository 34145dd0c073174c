"""Check of a node's mounts before a script starts there: a node with a mount that has lost its process is stopped.

The instance has mounted it again by then, and only the next task sees that (infra/definitions/mounts.py). ECS starts
`ray-worker` on the instance again, and the run goes on without the node until then, which is not a failure.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, MOUNTS_DIR
from ray_on_ecs.run.gpu_check import stop_node

MOUNT_TABLE = Path("/proc/self/mounts")


def stop_node_if_mounts_fail() -> bool:
    """Ask the node to stop if a mount of the stack is dead, and return whether it does; not on other machines."""
    if INSTANCE_FILE_VARIABLE not in os.environ:
        return False
    dead = [place for place in _mounts() if _is_dead(place)]
    return bool(dead) and stop_node(f"{' and '.join(dead)} can't be read any longer ({os.strerror(errno.ENOTCONN)})")


def _mounts() -> list[str]:
    """Return the mount points of the stack's file systems; the kernel writes a space in one as an octal number."""
    places = [line.split()[1] for line in MOUNT_TABLE.read_text().splitlines()]
    return [place for place in places if place.startswith(f"{MOUNTS_DIR}/")]


def _is_dead(place: str) -> bool:
    """Return whether the process behind a mount has ended; any other error may pass."""
    try:
        os.stat(place)
    except OSError as cause:
        return cause.errno == errno.ENOTCONN
    return False
