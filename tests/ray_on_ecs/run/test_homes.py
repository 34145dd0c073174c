"""Workers of a run whose node group changes while it waits for successors of those that it has lost."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.homes import RayCluster

A, B = {"ray.io/availability-zone": "us-west-2a"}, {"ray.io/node-group": "h100"}
CONFIG = RunConfig(num_workers=2)


class Choice:
    """The choice of a run, which a test makes."""

    kind = "workers"
    line = "EC2 has none"
    labels = A

    def move(self) -> None:
        self.kind, self.labels = "h100-workers", B


class OfRay:
    """Ray, with the nodes that a test gives: None while none has joined."""

    RAY_ERRORS = (OSError,)

    def __init__(self) -> None:
        self.found: Any = None

    def allocate(self, config: RunConfig, choice: Any) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def home() -> Any:
    home: Any = RayCluster.__new__(RayCluster)
    home._choice, home._of_ray, home._config = Choice(), OfRay(), CONFIG
    home._kind, home._is_provisional = "workers", False
    home.allocation = WorkerAllocation(2, True, 4, node_labels=A)
    return home


def test_places_stay_while_the_node_group_does(home: Any) -> None:
    home._of_ray.found = WorkerAllocation(2, True, 96, node_labels=B)
    assert home._allocate() == WorkerAllocation(2, True, 4, node_labels=A)


@pytest.mark.parametrize("nothing", [None, OSError("the head does not answer")])
def test_workers_are_requested_elsewhere_before_there_is_a_node(home: Any, nothing: Any) -> None:
    home._choice.move()
    home._of_ray.found = nothing
    asked = WorkerAllocation(2, True, 1, node_labels=B)
    assert home._allocate() == home._allocate() == asked
    home._of_ray.found = WorkerAllocation(2, True, 96, node_labels=B)
    assert home._allocate() == home._of_ray.found, "with its CPUs once a node has joined"
    home._of_ray.found = nothing
    assert home._allocate().cpus_per_worker == 96


def test_elastic_run_keeps_its_limits(home: Any) -> None:
    home.allocation = WorkerAllocation(3, True, 4, (2, 4), node_labels=A)
    home._choice.move()
    assert home._allocate() == WorkerAllocation(3, True, 1, (2, 4), node_labels=B)


def test_kinds_are_those_of_the_choice(home: Any) -> None:
    home._choice.move()
    assert home.kinds() == ("h100-workers",)
    home._choice = None
    assert home.kinds() == ("workers",)
