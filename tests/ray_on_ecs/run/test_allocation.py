"""The workers that fit into the nodes of a cluster, or on this machine."""

from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.run import allocation
from ray_on_ecs.run.allocation import WorkerAllocation, allocate_here, allocate_workers
from tests.lazy import Lazy

ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")
HEAD = {"CPU": 0.0, "memory": 1e9}
G5_XLARGE = {"CPU": 4.0, "GPU": 1.0}
G5_12XLARGE = {"CPU": 48.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "settings", "expected"),
    [
        ([HEAD, G5_XLARGE, G5_XLARGE], {}, (2, True, 4)),
        ([HEAD, G5_12XLARGE], {}, (4, True, 12)),
        ([HEAD, G5_12XLARGE], {"num_workers": 2}, (2, True, 12)),
        ([HEAD, G5_XLARGE, G5_XLARGE], {"device": "cpu"}, (2, False, 4)),
        ([{"CPU": 8.0}], {}, (2, False, 4)),
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"num_workers": 3}, (3, False, 1)),
        ([HEAD, G5_XLARGE], {"num_workers": "1:4"}, (1, True, 4, (1, 4))),
        ([HEAD, G5_12XLARGE, G5_12XLARGE], {"num_workers": "1:4"}, (4, True, 12, (1, 4))),
        ([HEAD, G5_XLARGE], {"num_workers": "2:4"}, None),
        ([HEAD], {}, None),
        ([HEAD, G5_XLARGE], {"num_workers": 2}, None),
        ([HEAD, {"CPU": 8.0}], {"device": "cuda"}, None),
        ([], {}, None),
    ],
)
def test_workers_get_the_most_cpus_that_fit(
    nodes: list[dict[str, float]], settings: dict[str, object], expected: tuple[Any, ...] | None
) -> None:
    wanted = expected and WorkerAllocation(*expected)
    assert allocate_workers(RunConfig(**settings), nodes) == wanted  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, 0, (2, False, 2)),
        ({"num_workers": 8}, 0, (8, False, 1)),
        ({"num_workers": "1:4"}, 0, (4, False, 1, (1, 4))),
        ({}, 2, (2, True, 2)),
        ({"device": "cpu"}, 2, (2, False, 2)),
    ],
)
def test_workers_of_a_machine_share_its_cpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpus: int, expected: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(allocation.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(allocation, "count_gpus", lambda: gpus)
    assert allocate_here(RunConfig(**settings)) == WorkerAllocation(*expected)


def test_machine_without_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "count_gpus", lambda: 0)
    with pytest.raises(ResourceError, match="the run needs a GPU and a CPU for each worker, but"):
        allocate_here(RunConfig(device="cuda"))
