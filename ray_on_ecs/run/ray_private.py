"""The names of Ray that are not public: an upgrade of Ray that moves one fails in the tests of this module.

Those of the image's commands are in `ray_on_ecs.node`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from ray import JobID
from ray._private import worker
from ray._private.state import available_resources_per_node as available_resources_per_node
from ray._private.state import state
from ray.exceptions import RayError
from ray.util import get_node_ip_address

# Errors of Ray's calls while the head does not answer, or once it is lost.
RAY_ERRORS = (RayError, OSError, RuntimeError, ValueError)
# The function of `worker` that prints the lines that Ray forwards to a driver.
PRINT = "print_to_stdstream"
HEAD_SECONDS = 5


def print_by(function: Callable[..., None]) -> None:
    """Make Ray print forwarded lines by a function; call it before `ray.init`, which passes the function to threads."""
    setattr(worker, PRINT, function)


def draining_nodes() -> dict[str, float | None]:
    """Return the IDs of the nodes that are draining, with the deadlines (Unix time), or None where there is none.

    A GCS that does not answer knows of none.
    """
    try:
        nodes: dict[str, int] = state.get_draining_nodes()
    except RAY_ERRORS:
        return {}
    return {node: milliseconds / 1000 if milliseconds else None for node, milliseconds in nodes.items()}


def join_times() -> dict[str, float]:
    """Return when each node joined (Unix time), by its ID; `ray.nodes()` leaves that out."""
    connected: Any = worker.global_worker
    nodes: dict[Any, Any] = connected.gcs_client.get_all_node_info(timeout=HEAD_SECONDS)
    return {node_id.hex(): node.start_time_ms / 1000 for node_id, node in nodes.items()}


def jobs_of(pids: Container[int]) -> set[str]:
    """Return the IDs of Ray's jobs whose drivers have these process IDs on this node."""
    address = get_node_ip_address()
    table: list[dict[str, Any]] = state.job_table()
    return {
        job["JobID"]
        for job in table
        if job["DriverPid"] in pids and job["DriverIPAddress"] == address and not job["IsDead"]
    }


def actors_of(job: str) -> list[dict[str, Any]]:
    """Return Ray's table of the actors of a job."""
    return list(state.actor_table(None, JobID.from_hex(job)).values())
