"""Check of a node's mounts before a script starts there: a node with a mount that has lost its process is stopped.

The instance has mounted it again by then, and only the next task sees that (infra/definitions/mounts.py). ECS starts
`ray-worker` on the instance again, and the run goes on without the node until then, which is not a failure. Only FUSE
has such a process; EFS and Lustre block until their servers answer.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, MOUNTS_DIR
from ray_on_ecs.run.gpu_check import stop_node
from ray_on_ecs.run.patience import ask

MOUNT_TABLE = Path("/proc/self/mounts")
# A process that hangs may go on, so that its mount is not dead.
STAT_SECONDS = 5.0


def stop_node_if_mounts_fail(*, asks: bool) -> bool:
    """Return whether the node stops because a mount of the stack is dead; never on other machines.

    Each worker of the node looks, and one of them `asks` the node to stop.
    """
    if INSTANCE_FILE_VARIABLE not in os.environ:
        return False
    dead = [place for place in _mounts() if _is_dead(place)]
    fault = f"{' and '.join(dead)} can't be read any longer ({os.strerror(errno.ENOTCONN)})"
    return bool(dead) and (not asks or stop_node(fault))


def _mounts() -> list[str]:
    """Return the mount points of the stack's FUSE file systems; the kernel writes a space as an octal number."""
    lines = [line.split() for line in MOUNT_TABLE.read_text(errors="surrogateescape").splitlines()]
    of_fuse = [place for _, place, kind, *_ in lines if kind.partition(".")[0] == "fuse"]
    return [place for place in of_fuse if place.startswith(f"{MOUNTS_DIR}/")]


def _is_dead(place: str) -> bool:
    """Return whether the process behind a mount has ended; any other error may pass."""
    try:
        ask(partial(os.stat, place), seconds=STAT_SECONDS)
    except OSError as cause:
        return cause.errno == errno.ENOTCONN
    return False
