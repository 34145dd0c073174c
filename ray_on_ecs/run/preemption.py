"""What Ray Train knows of nodes that are being reclaimed."""

from __future__ import annotations

import time

import ray.train

from ray_on_ecs.checkpoint.preemption import Preemption

# The key of rank 0's result that has the ranks whose nodes are being reclaimed, if that is why the workers have ended.
PREEMPTED = "preempted"
# Assumed when AWS reports no deadline.
DEFAULT_PREEMPTION_SECONDS = 60.0
# Stop saving this long before the deadline.
MARGIN_SECONDS = 5.0


def preemption() -> Preemption | None:
    """Return what Ray Train knows of nodes that are being reclaimed: a spot instance, a draining node, a deployment.

    It is the same on all ranks, which must call it at the same step.
    """
    if (info := ray.train.get_preemption_info()) is None:
        return None
    deadline = info.deadline_ms / 1000 if info.deadline_ms else time.time() + DEFAULT_PREEMPTION_SECONDS
    return Preemption(list(info.preempted_ranks), deadline - MARGIN_SECONDS)
