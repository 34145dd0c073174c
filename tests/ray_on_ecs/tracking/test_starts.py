"""Timeline of a start: parts that are never negative and add up to the whole, whatever the clocks and documents say."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from ray_on_ecs.tracking.starts import (
    FIRST_STEP_SECONDS,
    OF_NODE,
    PARTS,
    SKEW_SECONDS,
    Start,
    Starts,
    compose,
    describe,
    moment,
    moments_in,
    starts_in,
)

REQUESTED = 1_767_225_600.0
# The seconds of each part.
COLD = {"alarm": 64, "instance": 91, "boot": 48, "image": 190, "Ray": 25, "environment": 41, "first step": 13}
LINE = "alarm 1:04, instance 1:31, boot 0:48, image 3:10, Ray 0:25, environment 0:41, first step 0:13"
ENDS = dict(zip(PARTS.values(), itertools.accumulate(COLD.values()), strict=True))
MOMENTS = {name: REQUESTED + seconds for name, seconds in ENDS.items()}
END = MOMENTS["step"]
SUBSETS = [names for count in range(len(PARTS) + 1) for names in itertools.combinations(PARTS.values(), count)]


def start(parts: dict[str, float], *, is_over: bool = True) -> Start:
    return {"requested": "2026-01-01T00:00:00.000+00:00", "parts": parts, "is_over": is_over}


def check(parts: dict[str, float], whole: float) -> None:
    """Assert the rules of all parts, and of the line that shows them."""
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(whole)
    line = describe(start(parts))
    total, _, rest = line.partition(" = ")
    minutes, seconds = int(total.split()[0]), int(total.split()[2])
    assert 60 * minutes + seconds == round(whole)
    shown = [part.rpartition(" ")[2].split(":") for part in rest.split(", ") if rest]
    assert sum(60 * int(minutes) + int(seconds) for minutes, seconds in shown) == round(whole)


def test_each_part_ends_with_its_moment() -> None:
    assert compose(REQUESTED, MOMENTS, END) == COLD
    assert describe(start(compose(REQUESTED, MOMENTS, END))) == f"7 min 52 s = {LINE}"


@pytest.mark.parametrize("missing", SUBSETS, ids=lambda names: "-".join(names) or "none")
def test_missing_moments_join_parts(missing: tuple[str, ...]) -> None:
    known = {name: time for name, time in MOMENTS.items() if name not in missing}
    parts = compose(REQUESTED, known, END)
    check(parts, END - REQUESTED)
    for name, seconds in COLD.items():  # a part between two known moments is exact
        before = list(PARTS)[list(PARTS).index(name) - 1]
        if PARTS[name] in known and (name == "alarm" or PARTS[before] in known):
            assert parts[name] == seconds
    of_node = {PARTS[name] for name in OF_NODE}
    if set(missing) == of_node - {"joined"}:
        assert parts == {"workers": sum(COLD[name] for name in OF_NODE), "environment": 41, "first step": 13}


@pytest.mark.parametrize("until", [*ENDS.values(), 0.0, 1.0, -5.0])
def test_start_that_goes_on_names_its_last_part(until: float) -> None:
    known = {name: REQUESTED + seconds for name, seconds in ENDS.items() if seconds < until}
    known = known if "joined" in known else {}  # a node tells nothing before it has joined
    parts = compose(REQUESTED, known, REQUESTED + until)
    check(parts, max(until, 0))
    if until > 0:
        expected = "workers" if not known else "environment" if "script" not in known else "first step"
        assert list(parts)[-1] == expected


SHIFTS = [-1e6, -3600.0, -500.0, -1.0, -0.001, 0.0, 0.001, 1.0, SKEW_SECONDS, 500.0, 3600.0, 1e6, math.inf, math.nan]


@pytest.mark.parametrize("shift", SHIFTS)
def test_other_clocks_make_no_part_negative(shift: float) -> None:
    for names in SUBSETS:
        shifted = {name: time + shift if name in names else time for name, time in MOMENTS.items()}
        check(compose(REQUESTED, shifted, END), END - REQUESTED)


def test_any_order_adds_up() -> None:
    for order in itertools.permutations(ENDS.values()):
        shuffled = {name: REQUESTED + seconds for name, seconds in zip(PARTS.values(), order, strict=True)}
        check(compose(REQUESTED, shuffled, END), END - REQUESTED)


def test_equal_moments_leave_out_parts() -> None:
    assert compose(REQUESTED, dict.fromkeys(MOMENTS, REQUESTED + 5), REQUESTED + 5) == {"alarm": 5}
    assert compose(REQUESTED, dict.fromkeys(MOMENTS, REQUESTED), REQUESTED) == {}
    assert describe(start({})) == "0 min 0 s"


def test_moment_far_in_the_future_is_none_of_this_start() -> None:
    parts = compose(REQUESTED, {**MOMENTS, "booted": END + SKEW_SECONDS + 1}, END)
    assert parts == {**{name: COLD[name] for name in COLD if name not in ("instance", "boot")}, "instance to boot": 139}


@pytest.mark.parametrize(
    ("before", "parts"),
    [
        # The number of moments before the request.
        (0, COLD),
        (1, {"instance": 155, **{name: COLD[name] for name in list(COLD)[2:]}}),
        (2, {"alarm": 203, **{name: COLD[name] for name in list(COLD)[3:]}}),
        (3, {"image": 393, **{name: COLD[name] for name in list(COLD)[4:]}}),
        (4, {"Ray": 418, "environment": 41, "first step": 13}),
        (5, {"environment": 459, "first step": 13}),
    ],
)
def test_node_that_was_there_has_only_later_parts(before: int, parts: dict[str, float]) -> None:
    early = {name: REQUESTED - 100 + number for number, name in enumerate(list(MOMENTS)[:before])}
    assert compose(REQUESTED, {**MOMENTS, **early}, END) == parts


def test_shown_parts_add_up_although_they_are_rounded() -> None:
    line = describe(start({"alarm": 0.4, "instance": 0.4, "boot": 0.4, "image": 60.4}, is_over=False))
    assert line == "1 min 2 s so far = instance 0:01, image 1:01"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2026-01-01T00:00:00Z", REQUESTED),
        ("2026-01-01T00:00:00.123456789Z", REQUESTED + 0.123456),
        ("2026-01-01T05:30:00+05:30", REQUESTED),
        ("2025-12-31T16:00:00-08:00", REQUESTED),
        ("2026-01-01T00:00:00", REQUESTED),
        ("1767225600.000", REQUESTED),
        (1767225600, REQUESTED),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        ("null", None),
        ("yesterday", None),
        ("2026-13-01T00:00:00Z", None),
        ("nan", None),
        ("inf", None),
        ("-5", None),
        (None, None),
        (True, None),
        ([], None),
        ({}, None),
        (b"\xff", None),
        (10**400, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_moment_is_any_form_of_a_time(value: object, seconds: float | None) -> None:
    assert moment(value) == (None if seconds is None else pytest.approx(seconds))


def test_time_without_a_zone_is_utc_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert moment("2026-01-01T00:00:00") == REQUESTED
    finally:
        monkeypatch.undo()
        time.tzset()


def test_moments_in_labels_leave_out_what_is_no_time() -> None:
    labels = {
        "launched": "1767225600.000",
        "booted": "soon",
        "pulled": "",
        "zone": "us-west-2a",
        "joined": 1767225700.0,
    }
    assert moments_in(labels) == {"launched": REQUESTED, "joined": REQUESTED + 100}


DOCUMENTS: dict[str, Any] = {
    "null": None,
    "a list": [1],
    "without": {},
    "not a list": {"starts": "x"},
    "not a start": {"starts": [1, None, {}, {"requested": "2026-01-01"}]},
    "parts of another form": {"starts": [{**start({}), "parts": [1]}]},
    "not numbers": {"starts": [start({"alarm": each}) for each in ("x", None, [], 10**400)]},  # ty: ignore[invalid-argument-type]
    "not finite": {"starts": [start({"alarm": math.nan}), start({"alarm": math.inf})]},
    "too long": {"starts": [start({"alarm": 1e308, "boot": 1e308})]},
    "negative": {"starts": [start({"alarm": -1.0})]},
    "not a time": {"starts": [{**start({}), "requested": each} for each in ("soon", "1767225600", 7, None)]},
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_starts_of_other_documents_are_left_out(name: str) -> None:
    assert starts_in(DOCUMENTS[name]) == []


# Events of a start, with the seconds after the request at which they happen.
NEW = {"joined": REQUESTED + 418}
OLD = {"joined": REQUESTED - 1000}


def shown(starts: Starts, now: float) -> list[str]:
    return [describe(document) for document in starts.documents(now)]


def begun(*nodes: dict[str, float], before: int = 0) -> Starts:
    """A run with so many finished starts before this one, whose workers have places."""
    starts = Starts()
    for _ in range(before):
        starts.request(REQUESTED - 50)
        starts.place([], REQUESTED - 50)
        starts.begin_scripts(REQUESTED - 45)
        starts.reach_step(REQUESTED - 40)
    starts.request(REQUESTED)
    starts.place(nodes, REQUESTED + 418)
    return starts


def test_cold_start_is_shown_from_the_request_to_the_step() -> None:
    starts = Starts()
    assert not starts.is_open
    starts.request(REQUESTED)
    assert starts.needs_places
    assert shown(starts, REQUESTED + 100) == ["1 min 40 s so far = workers 1:40"]
    starts.place([{**MOMENTS, "joined": MOMENTS["joined"] - 1}, dict(list(MOMENTS.items())[:5]), OLD], REQUESTED + 420)
    assert not starts.needs_places
    assert shown(starts, REQUESTED + 430)[0].endswith("Ray 0:25, environment 0:12")
    starts.begin_scripts(MOMENTS["script"])
    assert shown(starts, END - 3)[0].endswith("environment 0:41, first step 0:10")
    done = starts.reach_step(END)
    assert done
    assert describe(done) == f"7 min 52 s = {LINE}"
    assert not starts.is_open
    assert starts.documents(END + 9999) == [done] == starts_in({"starts": [done]})


@pytest.mark.parametrize(
    ("node", "before", "number", "is_said"),
    [(NEW, 0, 1, True), (OLD, 0, 1, False), (NEW, 1, 2, True), (OLD, 1, 1, False), ({}, 1, 2, True)],
    ids=["cold", "warm", "restart on a new node", "restart on the same nodes", "Ray does not answer"],
)
def test_first_start_and_waits_for_nodes_are_kept(
    node: dict[str, float], before: int, number: int, is_said: bool
) -> None:
    starts = begun(node, before=before)
    assert not starts.needs_places, "the head would be asked at each poll"
    starts.begin_scripts(REQUESTED + 430)
    assert bool(starts.reach_step(REQUESTED + 440)) is is_said
    assert len(starts.documents(END)) == number
    assert not starts.is_open


def test_machine_without_ray_has_no_node() -> None:
    starts = begun()
    starts.begin_scripts(REQUESTED + 41)
    assert starts.reach_step(REQUESTED + 54) is None
    assert shown(starts, END) == ["0 min 54 s = environment 0:41, first step 0:13"]


def test_start_without_a_step_ends_with_its_script() -> None:
    for end in (lambda starts: starts.end(), lambda starts: starts.look(REQUESTED + 431 + FIRST_STEP_SECONDS)):
        starts = begun(NEW)
        starts.begin_scripts(REQUESTED + 430)
        starts.look(REQUESTED + 430 + FIRST_STEP_SECONDS)
        assert starts.is_open
        end(starts)
        assert shown(starts, END + 9999) == ["7 min 10 s = workers 6:58, environment 0:12"]


def test_start_whose_scripts_never_began_goes_on() -> None:
    starts = begun(NEW)
    starts.end()
    assert starts.is_open
    starts.request(REQUESTED + 500)
    assert starts.needs_places
    assert shown(starts, REQUESTED + 600) == ["10 min 0 s so far = workers 10:00"]
    starts.begin_scripts(REQUESTED + 430)
    starts.begin_scripts(REQUESTED + 435)  # the first time counts
    starts.request(REQUESTED + 1000)
    assert [document["is_over"] for document in starts.documents(END)] == [True, False]


def test_events_without_a_request_say_nothing() -> None:
    starts = Starts()
    starts.place([NEW], REQUESTED)
    starts.begin_scripts(REQUESTED)
    starts.look(REQUESTED)
    starts.end()
    assert starts.reach_step(REQUESTED) is None
    assert starts.documents(REQUESTED) == []


def test_starts_of_earlier_commands_come_first() -> None:
    starts = begun()
    starts.follow([start({"alarm": 1.0})])
    assert shown(starts, REQUESTED + 5) == ["0 min 1 s = alarm 0:01", "0 min 5 s so far = environment 0:05"]
