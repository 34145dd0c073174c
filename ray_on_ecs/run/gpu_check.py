"""Check of a node's GPUs before a script starts there again: the run leaves a node whose GPUs do not compute.

Ray drains such a node, and the driver treats it like one that is reclaimed, which is not a failure. Once the node has
ended, `ray-worker` finds the same fault at its next start and has the instance replaced.
"""

from __future__ import annotations

import os

import ray

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.errors import one_line
from ray_on_ecs.node import gpus
from ray_on_ecs.node.errors import GpuError, NodeError
from ray_on_ecs.run.ray_private import drain_node


def drain_if_gpus_fail() -> bool:
    """Check the GPUs that this process sees; drain the node if they fail, and return whether Ray does that.

    Only on an instance of the stack: no other machine is replaced.
    """
    if INSTANCE_FILE_VARIABLE not in os.environ:
        return False
    fault = _fault_of_gpus()
    if fault is None:
        return False
    try:
        drain_node(ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id(), fault)
    except Exception as cause:  # Ray's own errors have no class in common; the script starts, and says more
        print(f"{fault}; Ray could not drain this node ({one_line(cause)})", flush=True)
        return False
    print(f"{fault}; Ray drains this node, and the run goes on without it", flush=True)
    return True


def _fault_of_gpus() -> str | None:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    try:
        gpus.check(len([device for device in devices if device]))
    except GpuError as fault:
        return one_line(fault)
    except (NodeError, OSError):  # not a GPU's fault, but the image's or this machine's
        return None
    return None
