"""Check of a node's GPUs before a script starts there again: a node whose GPUs do not compute is stopped.

The run leaves such a node as it leaves one that is reclaimed, which is not a failure. ECS starts `ray-worker` on the
instance again, which finds the same fault and has the instance replaced.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.errors import GpuError, NodeError, one_line
from ray_on_ecs.node import gpus

logger = logging.getLogger(__name__)


def stop_node_if_gpus_fail() -> bool:
    """Check the GPUs that this process sees; ask the node to stop if they fail, and return whether it does.

    Only on an instance of the stack: no other machine is replaced.
    """
    if INSTANCE_FILE_VARIABLE not in os.environ:
        return False
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    try:
        gpus.check(len([device for device in devices if device]))
    except GpuError as fault:
        # Memory that a process of the last start still holds is not a fault.
        return "out of memory" not in str(fault) and stop_node(one_line(fault))
    except (NodeError, OSError):  # a fault of the image or the machine, which the script's own error names
        return False
    return False


def stop_node(fault: str) -> bool:
    """Ask this node's `ray-worker` to stop, as ECS does: Ray drains the node; return False if that is not possible."""
    try:
        for process in psutil.Process().parents():
            if "ray-worker" in [Path(word).name for word in process.cmdline()]:
                logger.warning(f"{fault}; this node stops, and the run goes on without it")
                process.terminate()
                return True
        reason = "ray-worker does not run it"
    except psutil.Error as cause:
        reason = one_line(cause)
    logger.warning(f"{fault}; this node could not be stopped ({reason})")
    return False
