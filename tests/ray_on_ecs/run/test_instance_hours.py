"""The hours of the instances on which a run has workers."""

import pytest

from ray_on_ecs.tracking.cost import InstanceKind
from tests.lazy import Lazy

instance_hours = Lazy("ray_on_ecs.run.instance_hours")
G5 = InstanceKind("g5.xlarge", "on-demand")
SPOT = InstanceKind("g5.xlarge", "spot")


def test_intervals_count_the_instances_at_their_end() -> None:
    counts = iter([{G5: 2}, {G5: 2, SPOT: 1}, {}])
    hours = instance_hours.InstanceHours(lambda: next(counts))
    for now in (1000.0, 1000.0 + 3600, 1000.0 + 5400, 1000.0 + 9000):
        hours.read(now)
    assert hours.by_kind == pytest.approx({G5: 2 * 1 + 2 * 0.5 + 0, SPOT: 1 * 0.5})


@pytest.mark.parametrize(
    ("seconds", "most"),
    [(10.0, {G5: 1}), (35.0, {G5: 1, SPOT: 2}), (45.0, {G5: 3, SPOT: 2}), (1e9, {G5: 4, SPOT: 2})],
)
def test_instances_of_the_last_seconds_are_the_most(seconds: float, most: dict[InstanceKind, int]) -> None:
    """A run has had four instances, and ends with one of them; workers that have left count as long as they idle."""
    numbers = [{G5: 4}, {G5: 3}, {G5: 3}, {SPOT: 2}, {G5: 1}, {G5: 1}, {}]
    counts = iter(numbers)
    hours = instance_hours.InstanceHours(lambda: next(counts))
    assert hours.most(seconds) == {}
    for index in range(len(numbers) + 1):
        hours.read(1000.0 + 10 * index)
    assert hours.most(seconds) == most
