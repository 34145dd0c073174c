"""Slow ranks in a run's documents."""

from typing import Any

import pytest

from ray_on_ecs.tracking.slow_ranks import slow_in, waits_in

SLOW = {"since": "2026-11-29T18:00:00+00:00", "until": None, "what": "rank 1 comes last"}
WAIT = {"rank": 1, "node": "i-1, 10.0.2.1", "share": 0.031}


def test_rows_of_a_document_are_read() -> None:
    document = {"slow": [SLOW], "waits": [WAIT, {**WAIT, "rank": 2, "node": "", "share": 1}]}
    assert slow_in(document) == [SLOW]
    assert waits_in(document) == {
        "rank 1 (i-1, 10.0.2.1)": "waits 3.1 % of the time",
        "rank 2": "waits 100.0 % of the time",
    }


@pytest.mark.parametrize("document", [None, 5, {}, {"slow": 5, "waits": None}, {"slow": [None, 3], "waits": [{}, []]}])
def test_foreign_documents_have_no_rows(document: Any) -> None:
    assert slow_in(document) == []
    assert waits_in(document) == {}


@pytest.mark.parametrize("change", [{"since": 5}, {"until": 7}, {"what": None}])
def test_a_broken_time_is_left_out(change: dict[str, Any]) -> None:
    assert slow_in({"slow": [SLOW | change, SLOW]}) == [SLOW]


@pytest.mark.parametrize("key", SLOW)
def test_a_time_without_a_key_is_left_out(key: str) -> None:
    assert slow_in({"slow": [{name: value for name, value in SLOW.items() if name != key}, SLOW]}) == [SLOW]
