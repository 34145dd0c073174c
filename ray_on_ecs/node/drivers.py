"""Drivers of a cluster's runs, as jobs of the head's container: its desk starts them, and commands in its shell."""

import os
from contextlib import suppress
from pathlib import Path

from ray_on_ecs.contract import HEAD_STATE_VARIABLE
from ray_on_ecs.errors import UsageError
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.node import api, ports


def of_head() -> MachineJobs:
    """Return the jobs of the head in this container; their records outlive it as its state does (node/state.py)."""
    state = os.environ.get(HEAD_STATE_VARIABLE)
    token = api.own_token()
    ray = {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS") or ports.own_gcs()}
    if token:
        ray |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if state:
        with suppress(UsageError):
            return MachineJobs(Path(state) / "jobs", ray, is_head=True)
    return MachineJobs(None, ray, is_head=True)
