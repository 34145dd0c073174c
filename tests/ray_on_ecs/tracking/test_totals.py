"""Time and cost of a run are those of all its commands."""

from typing import Any

import pytest

from ray_on_ecs.tracking.totals import earlier_of, total_seconds, total_usd


def status(seconds: int, usd: float | None, earlier: Any = None) -> dict[str, Any]:
    times = {"started": "2026-01-02T03:00:00.000+00:00", "updated": f"2026-01-02T03:00:{seconds:02}.000+00:00"}
    return {**times, "cost_usd": usd, **({"earlier": earlier} if earlier else {})}


def test_each_command_adds_its_own_part() -> None:
    first = status(30, 1.0)
    second = status(20, 0.5, earlier_of(first))
    third = status(10, 0.25, earlier_of(second))
    assert (total_seconds(third, {}), total_usd(third, {})) == (60, 1.75)
    result = {"times": {"total_seconds": 12.0}, "cost": {"usd": 0.3}, "earlier": earlier_of(second)}
    assert (total_seconds(third, result), total_usd(third, result)) == (62, 1.8)


@pytest.mark.parametrize("unknown", [(None, 1.0), (1.0, None)])
def test_unknown_cost_makes_the_total_unknown(unknown: tuple[float | None, float | None]) -> None:
    first, second = unknown
    assert total_usd(status(20, second, earlier_of(status(30, first))), {}) is None


def test_run_before_its_start_has_no_time() -> None:
    assert (total_seconds({}, {}), total_usd({}, {})) == (None, None)
    assert earlier_of(None) == {"seconds": 0.0, "usd": 0.0}
