"""The hours of the instances on which a run has workers."""

import pytest

from training.launchers.instance_meter import InstanceMeter


def test_each_interval_counts_by_the_instances_at_its_end() -> None:
    counts = iter([2, 3, 0])
    meter = InstanceMeter(lambda: next(counts))
    for now in (1000.0, 1000.0 + 3600, 1000.0 + 5400, 1000.0 + 9000):
        meter.read(now)
    assert meter.hours == pytest.approx(2 * 1 + 3 * 0.5 + 0)
