"""Arithmetic of a head that sleeps: the alarm's expression, and histories with faults under each reading."""

from __future__ import annotations

import pytest

from infra.config.rules import SHORTEST_SLEEP_MINUTES
from infra.definitions.sleep import IDLE_MINUTES, WAKE_PERIOD_SECONDS, WAKE_POINTS
from tests.cloudwatch_alarm import Alarm
from tests.metric_math import evaluate
from tests.sleep_aws import MINUTE, Design
from tests.sleep_simulator import History

SHARES, HISTORIES = 10, 10_000


@pytest.mark.parametrize(
    ("idle", "requested", "minutes"),
    [
        (0, None, 0),
        (14.9, None, 14.9),
        (60, None, 60),
        (60, 1, 0),
        (0, 1, 0),
        (None, 1, 0),
        (60, 0, 60),
        (None, 0, 0),
        (None, None, None),
    ],
)
def test_request_suppresses_the_idle_time(idle: float | None, requested: float | None, minutes: float | None) -> None:
    assert evaluate(IDLE_MINUTES, {"idle": idle, "requested": requested}) == minutes


# The tables of https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html: the five
# data points of an evaluation range, the oldest first, with the state if missing ones breach or don't.
@pytest.mark.parametrize(
    ("points", "needed", "breaching", "not_breaching"),
    [
        ("0-X-X", 3, False, False),
        ("0----", 3, False, False),
        ("-----", 3, True, False),
        ("0XX-X", 3, True, True),
        ("----X", 3, True, False),
        ("X----", 3, True, False),
        ("0-X-X", 2, True, True),
        ("00X0X", 2, True, True),
        ("0-X--", 2, True, False),
        ("----0", 2, True, False),
        ("----X", 2, True, False),
    ],
)
def test_alarm_evaluates_missing_data_as_documented(
    points: str, needed: int, breaching: bool, not_breaching: bool
) -> None:
    for missing, expected in ((True, breaching), (False, not_breaching)):
        alarm = Alarm(period=60, points=3, needed=needed, spare=2, missing_breaches=missing)
        assert alarm.rings(5 * 60, lambda slot: {"X": True, "0": False}.get(points[slot])) is expected


@pytest.mark.parametrize(("at_once", "minutes"), [(False, 4), (True, 1)])
def test_last_data_point_is_evaluated_again(at_once: bool, minutes: int) -> None:
    alarm = Alarm(period=60, spare=0 if at_once else 3, at_once=at_once, delay=30)
    first = alarm.sees(0)
    assert first == 120
    assert [alarm.rings(first + 60 * late, lambda slot: slot == 0 or None) for late in range(-1, minutes + 1)] == [
        False,
        *[True] * minutes,
        False,
    ]


def test_wake_outlasts_an_earlier_sleep() -> None:
    longest = max(History(seed, visits=[(0, "wake")]).window for seed in range(1000))
    assert longest <= WAKE_POINTS * WAKE_PERIOD_SECONDS < SHORTEST_SLEEP_MINUTES * MINUTE


@pytest.mark.parametrize("share", range(SHARES))
def test_no_history_breaks_a_property(share: int) -> None:
    for seed in range(share, HISTORIES, SHARES):
        design = Design(minutes=(15, 15, 30, 60, 120)[seed // SHARES % 5])
        assert not History(seed, design).play().broken, f"history {seed} of {design}"


@pytest.mark.parametrize(
    ("design", "broken"),
    [
        (Design(expression="idle"), "sleep in spite of a request"),
        (Design(is_flag=True), "sleep without idle time"),
        (Design(is_flag=True), "late sleep"),
        (Design(publishes_first=False), "request without a head"),
        (Design(sleep_ends_group=True), "no instance for a wake"),
        (Design(missing_breaches=True), "sleep without idle time"),
        (Design(sends_times=True), "sleep without idle time"),
        (Design(busy_head_requests=False), "a job is stopped"),
        (Design(wake_points=1), "request without a head"),
        (Design(wake_points=1), "wake without a head"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else None,
)
def test_another_design_breaks_a_property(design: Design, broken: str) -> None:
    assert any(broken in History(seed, design).play().broken for seed in range(4000))
