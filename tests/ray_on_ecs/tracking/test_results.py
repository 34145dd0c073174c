"""The parts of result.json that every run has."""

import time

from ray_on_ecs.tracking.results import run_times


def test_times_name_what_ended_the_preparations() -> None:
    times = run_times("script_start", time.time())
    assert list(times) == ["started", "script_start", "finished", "total_seconds", "to_script_start_seconds"]
    assert 0 < times["to_script_start_seconds"] <= times["total_seconds"]
    assert run_times("first_step", None)["first_step"] is None
