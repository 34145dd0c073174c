"""The start of Ray for a local run."""

import os
from contextlib import nullcontext
from typing import Any

import pytest

from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.clusters import LocalCluster


@pytest.mark.parametrize(
    ("workers", "started_with", "line"),
    [
        (0, 4, "starting Ray on this machine"),
        (4, 4, "starting Ray on this machine"),
        (8, 8, "starting Ray on this machine; 8 workers share 4 CPUs"),
    ],
)
def test_workers_that_share_cpus_are_announced(
    monkeypatch: pytest.MonkeyPatch, workers: int, started_with: int, line: str
) -> None:
    started: list[int] = []
    replaced: dict[str, Any] = {"lock": nullcontext, "find": lambda: None, "start": started.append}
    for name, function in replaced.items():
        monkeypatch.setattr(local_head, name, function)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said: list[str] = []
    assert LocalCluster().up(workers, said.append)
    assert (started, said) == ([started_with], [line])


def test_hints_repeat_a_typed_storage_path() -> None:
    cluster = LocalCluster()
    cluster.typed = " --local"
    assert cluster.command("fetch first") == "ray-on-ecs fetch --local first"
    cluster.typed_path = "/mnt/my runs"
    assert cluster.command("fetch first") == "RAY_ON_ECS_STORAGE_PATH='/mnt/my runs' ray-on-ecs fetch --local first"
