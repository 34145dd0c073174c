"""Slow ranks in a run's documents."""

from ray_on_ecs.tracking.slow_ranks import waits_in

WAIT = {"rank": 1, "node": "i-1, 10.0.2.1", "share": 0.031}


def test_waits_of_a_document_in_words() -> None:
    assert waits_in({"waits": [WAIT, {**WAIT, "rank": 2, "node": "", "share": 1}]}) == {
        "rank 1 (i-1, 10.0.2.1)": "waits 3.1 % of the time",
        "rank 2": "waits 100.0 % of the time",
    }
