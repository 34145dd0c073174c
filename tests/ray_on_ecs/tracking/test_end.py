"""Estimate of a run's end: tables of its cases, and simulated runs."""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ray_on_ecs.tracking.end import End, EndLog, Record, Steps, duration, end_in, end_of, noted, words

POLL_SECONDS = 0.25
MINUTES = [(600.0 * number, number) for number in range(10)]  # a step every ten minutes


def records_of(seen: Iterable[tuple[float, int]]) -> Sequence[Record]:
    """The records of steps at these times."""
    records: Sequence[Record] = ()
    for seconds, step in seen:
        records = noted(records, seconds, step)
    return records


def seconds_left(seen: Sequence[tuple[float, int]], total: int | None, later: float = 0.0) -> float | None:
    """The estimate so many seconds after the last step."""
    now, step = seen[-1]
    return end_of(Steps(step, total), records_of(seen), now + later).seconds_left


@pytest.mark.parametrize(
    ("seen", "total", "expected"),
    [
        (MINUTES, 100, 91 * 600),
        (MINUTES, None, None),
        (MINUTES, 0, None),
        (MINUTES, 8, None),
        (MINUTES, 9, 0),
        (MINUTES[:6], 100, 95 * 600),
        (MINUTES[:5], 100, None),
        ([(0.0, 0)], 1, None),
        ([(2.0 * number, 5000 + number) for number in range(100)], 10_000, 2 * 4901),
        ([(number / 10, 100 * number) for number in range(1000)], 1_000_000, 900.1),
        ([(3.0 * number, number) for number in range(900)] + [(2700 + number, number) for number in range(60)], 99, 40),
        ([(number + 300.0 * (number > 40), number) for number in range(50)], 100, 51),
        ([(number + 300.0 * (number > 48), number) for number in range(50)], 100, 51),
        ([(0.0, 0), *((500.0 + number, number) for number in range(1, 50))], 100, 51),
        ([(min(number, 2000) * 0.5 + max(number - 2000, 0) * 2.0, number) for number in range(3000)], 4000, 2002),
        ([*((float(number), number) for number in range(99)), (98.5, 97)], 200, 102),
    ],
    ids=[
        *("a step every ten minutes", "no total", "a total of 0", "a total below the step", "the last step"),
        *("the first estimate", "before it", "the only step", "resumed", "1,000 steps a second"),
        *("repeated steps after a fall", "a validation before", "a validation just now", "a slow first step"),
        *("another world size in one start", "a slower rank in the same output"),
    ],
)
def test_seconds_left(seen: list[tuple[float, int]], total: int | None, expected: float | None) -> None:
    assert seconds_left(seen, total) == (expected if expected is None else pytest.approx(expected, rel=0.02, abs=0.2))


def test_a_pause_takes_at_most_one_step_off() -> None:
    found = [seconds_left(MINUTES, 11, later) for later in (0.0, 300.0, 600.0, 7200.0)]
    assert found == [1200.0, 900.0, 600.0, 600.0]
    assert [seconds_left(MINUTES, 10, later) for later in (599.0, 7200.0)] == [1.0, 0.0]


def test_scripts_that_do_not_run_have_no_estimate() -> None:
    assert end_of(Steps(9, 100), (), 1e6, 12.4, 3.0) == End(9, 100, None, 12.4, None)


@pytest.mark.parametrize(
    ("usd", "hourly", "expected"), [(2.0, 6.0, 2.0 + 91.0), (None, 6.0, None), (2.0, None, None), (0.0, 0.6, 9.1)]
)
def test_dollars_at_the_end(usd: float | None, hourly: float | None, expected: float | None) -> None:
    end = end_of(Steps(9, 100), records_of(MINUTES), MINUTES[-1][0], usd, hourly)
    assert end.usd_at_end == (expected if expected is None else pytest.approx(expected))


def test_number_of_records_is_limited() -> None:
    assert len(records_of((0.05 * number, number) for number in range(100_000))) < 70


def simulated(chance: random.Random) -> list[float]:
    """Relative errors of the estimates in the second half of a run with noisy steps, at each tenth of its time."""
    total = round(10 ** chance.uniform(2.5, 4))
    mean, spread = 10 ** chance.uniform(-1.5, 1.5), chance.uniform(0.05, 0.5)
    ends, now = [], 0.0
    for _ in range(total):
        now += mean * chance.lognormvariate(-spread * spread / 2, spread)
        ends.append(now)
    records: Sequence[Record] = ()
    errors: list[float] = []
    polled_at = 0.0
    for step, end in enumerate(ends, 1):
        if end < polled_at:
            continue
        polled_at = end + chance.uniform(0, POLL_SECONDS)
        records = noted(records, polled_at, step)
        left = now - polled_at
        if left < now * (0.5 - 0.1 * len(errors)) and len(errors) < 4:
            found = end_of(Steps(step, total), records, polled_at).seconds_left
            errors.append(math.inf if found is None else abs(found - left) / left)
    return errors


def test_error_of_noisy_runs_is_below_a_fifth() -> None:
    chance = random.Random(1)
    worst = sorted(max(simulated(chance)) for _ in range(200))
    assert worst[int(0.95 * len(worst))] < 0.2


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (End(1200, 10_000, 11_400.0, 12.4, 41.3), "step 1,200 of 10,000, 3 h 10 min left, 12.40 USD so far, about 41 "),
        (End(1200, None, None, 12.4), "step 1,200, 12.40 USD so far"),
        (End(1200, 10_000, 11_400.0), "step 1,200 of 10,000, 3 h 10 min left"),
        (End(1200, 10_000, None, 12.4), "step 1,200 of 10,000, 12.40 USD so far"),
        (End(0), "step 0"),
        (End(10_000, 10_000, 0.0, 12.4, 12.4), "step 10,000 of 10,000, 12.40 USD so far"),
        (End(1, 2, 60.0, 41.4, 41.45), "step 1 of 2, 1 min left, 41.40 USD so far, about 41.45 at the end"),
        (End(1, 2, 60.0, 12.0, 12.3), "step 1 of 2, 1 min left, 12.00 USD so far, about 12.30 at the end"),
        (End(1, 2, 60.0, 11.996, 12.4), "step 1 of 2, 1 min left, 12.00 USD so far, about 12.40 at the end"),
        (End(1, 2, 60.0, 1200.0, 1210.0), "step 1 of 2, 1 min left, 1,200.00 USD so far, about 1,210.00 at the end"),
        (End(1, 2, 60.0, 0.0, 0.004), "step 1 of 2, 1 min left, 0.00 USD so far, about 0.00 at the end"),
        (End(1, 2, 60.0, 0.2, 0.555), "step 1 of 2, 1 min left, 0.20 USD so far, about 0.56 at the end"),
        (End(1, 2, 60.0, 1.0, 9.96), "step 1 of 2, 1 min left, 1.00 USD so far, about 10.0 at the end"),
        (End(1, 2, 60.0, 1.0, 12_345.0), "step 1 of 2, 1 min left, 1.00 USD so far, about 12,000 at the end"),
    ],
)
def test_line_of_an_end(end: End, line: str) -> None:
    assert words(end) == line + "at the end" * line.endswith("41 ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "under 1 min"),
        (59.0, "under 1 min"),
        (89.0, "1 min"),
        (3569.0, "59 min"),
        (3590.0, "1 h"),
        (4100.0, "1 h 10 min"),
        (35_800.0, "10 h"),
        (86_400.0, "24 h"),
        (172_000.0, "2.0 days"),
        (864_000.0, "10.0 days"),
    ],
)
def test_times_are_rounded_to_what_is_known(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ({"end": {"step": 3, "total": 9, "seconds_left": 60.0, "usd": 1.0, "usd_at_end": 2.0}}, End(3, 9, 60, 1, 2)),
        ({"step": 3}, End(3)),
        ({"step": 3, "end": None}, End(3)),
        ({"end": {"step": 3, "total": "9", "seconds_left": -1.0, "usd_at_end": 2.0}}, End(3)),
        ({"end": {"step": 3, "seconds_left": 1e300, "usd": math.nan}}, End(3)),
        ({"end": {"step": [3]}}, None),
        ({"step": 1e999, "end": []}, None),
        ({}, None),
    ],
)
def test_end_in_a_document(status: dict[str, Any], end: End | None) -> None:
    assert end_in(status, is_training=True) == end


def test_run_that_does_not_train_has_no_estimate() -> None:
    status = {"end": {"step": 3, "total": 9, "seconds_left": 60.0, "usd": 1.0, "usd_at_end": 2.0}}
    assert end_in(status, is_training=False) == End(3, 9, None, 1.0)


def test_log_has_a_line_for_each_tenth() -> None:
    log = EndLog(0.0)
    ends = [End(step, 1000, (1000 - step) * 36.0) for step in range(1001)]
    output = [end.step for end in ends if log.line(end, 36.0 * end.step)]
    assert output == [9, *range(100, 1000, 100)]


def test_log_of_a_short_or_unknown_run_has_no_line() -> None:
    for seconds, total, left in ((2.0, 100, 50.0), (100.0, None, None)):
        log = EndLog(0.0)
        assert not any(log.line(End(step, total, left), seconds * step) for step in range(100))


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ((3.0, 0.0), "about 5.0 hours, and --max-hours is 3"),
        ((0.0, 30.0), "about 41 USD, and --max-usd is 30"),
        ((4.99, 41.2), "about 5.0 hours, and --max-hours is 4.99; and about 41.30 USD, and --max-usd is 41.2"),
        ((4.91, 0.0), "about 5.0 hours, and --max-hours is 4.91"),
        ((0.0, 41.0), "about 41.30 USD, and --max-usd is 41"),
        ((5.0, 41.299), "about 41.30 USD, and --max-usd is 41.299"),
        ((5.0, 42.0), ""),
        ((0.0, 0.0), ""),
    ],
)
def test_limit_before_the_end_is_said_once(limits: tuple[float, float], line: str) -> None:
    log, end = EndLog(100.0, *limits), End(1200, 10_000, 3 * 3600.0, 12.4, 41.3)
    assert not log.warning(end, 2.0, 230.0, 110.0)
    assert not log.warning(end, 2.0, 349.0, 110.0)
    assert log.warning(end, 2.0, 350.0, 110.0) == (line and f"to its last step the run needs {line}")
    assert not log.warning(end, 3.0, 500.0, 110.0)


def warned_at(seen: Sequence[tuple[float, int]], total: int, max_hours: float, starts: Sequence[float] = ()) -> float:
    """The time of a warning by looks every ten seconds; 0 without one. The scripts also start at `starts`."""
    log, records, rest = EndLog(0.0, max_hours), (), [*starts]
    due = 10.0
    for seconds, step in seen:
        if rest and seconds >= rest[0]:
            records = ()
            rest.pop(0)
        records = noted(records, seconds, step)
        while due <= seconds:
            if log.warning(end_of(Steps(step, total), records, seconds), seconds / 3600, seconds, records[0].seconds):
                return seconds
            due += 10.0
    return 0.0


def steps_from(start: float, step: int, *paces: tuple[int, float]) -> list[tuple[float, int]]:
    """The times of steps that take so long, in groups of a number and seconds."""
    seen = [(start, step)]
    for pace in (pace for number, pace in paces for _ in range(number)):
        seen.append((seen[-1][0] + pace, seen[-1][1] + 1))
    return seen


QUICK = (600, 1.0)
AGAIN = [*steps_from(500.0, 0, (1000, 1.0)), *steps_from(1600.0, 1000, (7, 10.0), QUICK)]


@pytest.mark.parametrize(
    ("seen", "starts", "is_said"),
    [
        (steps_from(500.0, 0, (7, 10.0), QUICK), (), False),
        (steps_from(500.0, 0, (1, 300.0), QUICK), (), False),
        (steps_from(0.0, 0, (12, 10.0), QUICK), (), False),
        (steps_from(0.0, 0, (7, 30.0), QUICK), (), False),
        (AGAIN, (1600.0,), False),
        (steps_from(0.0, 0, QUICK, (90, 10.0), QUICK), (), True),
        (steps_from(500.0, 0, (100, 3.0)), (), True),
    ],
    ids=["slow first steps", "one", "many", "slower", "those of a restart", "slower for minutes", "slow"],
)
def test_warning_does_not_come_from_the_first_steps(
    seen: Sequence[tuple[float, int]], starts: Sequence[float], is_said: bool
) -> None:
    assert bool(warned_at(seen, 30_000, 12.0, starts)) == is_said


def test_warning_needs_estimates_of_two_minutes() -> None:
    log, over, within = EndLog(0.0, 3.0), End(1, 9, 4 * 3600.0), End(1, 9, 2 * 3600.0)
    for other in (within, End(1, 9)):
        assert not log.warning(over, 0.0, 200.0, 0.0)
        assert not log.warning(other, 0.0, 300.0, 0.0)
        assert not log.warning(over, 0.0, 320.0, 0.0)
        assert not log.warning(other, 0.0, 330.0, 0.0)
    assert not log.warning(over, 0.0, 400.0, 0.0)
    assert log.warning(over, 0.0, 520.0, 0.0)


@pytest.mark.parametrize(
    ("hours", "limit", "line"),
    [
        (10.4, 10.0, "about 10.40 hours, and --max-hours is 10"),
        (10.004, 10.0, ""),
        (0.3, 0.25, "about 0.30 hours, and --max-hours is 0.25"),
        (1_300_000.0, 1_234_567.0, "about 1,300,000 hours, and --max-hours is 1234567"),
        (1_240_000.0, 1_234_567.0, "about 1,240,000.00 hours, and --max-hours is 1234567"),
    ],
)
def test_warning_has_a_number_above_the_limit(hours: float, limit: float, line: str) -> None:
    log, end = EndLog(0.0, limit), End(1, 9, 0.0)
    assert not log.warning(end, hours, 200.0, 0.0)
    assert log.warning(end, hours, 400.0, 0.0) == (line and f"to its last step the run needs {line}")
