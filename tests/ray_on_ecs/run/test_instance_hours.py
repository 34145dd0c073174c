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
