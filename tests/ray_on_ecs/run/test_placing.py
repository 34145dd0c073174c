"""Places of workers: the wait for them ends with the time, or with the nodes."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.group import NoPlacesError
from tests.lazy import Lazy
from tests.run_folders import Clock

placing = Lazy("ray_on_ecs.run.placing")
ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time, on a cluster whose placement groups wait."""
    clock = Clock()
    monkeypatch.setattr(placing, "time", clock)
    monkeypatch.setattr(placing, "placement_group", lambda *given, **more: object())
    monkeypatch.setattr(ray_cluster, "placement_group_table", lambda group: {"state": "PENDING"})
    return clock


@pytest.mark.parametrize(
    ("has_nodes", "waited", "why"),
    [(True, 60, "2 workers had no places within 60 s"), (False, 5, "the nodes of 2 workers are lost")],
)
def test_workers_wait_only_for_nodes_that_are_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, has_nodes: bool, waited: float, why: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(placing, "has_nodes", lambda allocation: asked.append(allocation) or has_nodes)
    allocation = WorkerAllocation(2, True, 4)
    began, places = clock.monotonic(), placing.Placing(allocation, 60.0)
    with pytest.raises(NoPlacesError, match=why):
        any(iter(places.poll, None))
    assert waited <= clock.monotonic() - began < waited + 1
    assert {*map(str, asked)} == {str(allocation)}
    assert len(asked) <= 12, "the head is asked every few seconds"


def test_waiting_groups_are_given_up_before_placed_ones(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[object] = []
    removed: list[object] = []
    monkeypatch.setattr(placing, "placement_group", lambda *given, **more: groups.append(object()) or groups[-1])
    monkeypatch.setattr(placing, "remove_placement_group", removed.append)
    places = placing.Placing(WorkerAllocation(3, True, 4, limits=(1, 3)), 60.0)
    places.poll()
    places.close()
    assert (len(groups), removed) == (3, groups[::-1])
