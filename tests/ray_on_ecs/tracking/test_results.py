"""The times of result.json."""

import time

from ray_on_ecs.tracking.results import run_times


def test_times_are_those_of_this_command() -> None:
    times = run_times(time.time())
    assert list(times) == ["started", "script_start", "finished", "total_seconds", "to_script_start_seconds"]
    assert 0 < times["to_script_start_seconds"] <= times["total_seconds"]
