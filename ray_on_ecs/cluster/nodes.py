"""Nodes of a Ray cluster, from Ray's state API."""

from __future__ import annotations

from typing import Any

from ray_on_ecs.cluster.head import Head
from ray_on_ecs.node.code import LABEL as CODE

ALIVE = "ALIVE"


def nodes(head: Head) -> list[dict[str, Any]]:
    """Return the nodes, dead ones included.

    Raises:
        UsageError: The head refuses the token.
        ResourceError: The head doesn't answer.
    """
    return head.get("/api/v0/nodes?detail=1&limit=1000", "data", "result", "result")


def head_code(head: Head) -> str | None:
    """Return the fingerprint of the head's code (ray_on_ecs.node.code), or None without that label."""
    for node in nodes(head):
        if node["is_head_node"] and node["state"] == ALIVE:
            return node["labels"].get(CODE)
    return None
