"""Pools, types and zones of a run, as far as its documents have them."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.tracking.places import in_words, of_pool, places_in, pools_in

H100 = {"pool": "h100", "zones": ["us-west-2c"], "instance_type": "p5.48xlarge", "market": "spot"}
L4 = {"pool": "l4", "zones": ["us-west-2a", "us-west-2b"], "instance_type": "g6.xlarge", "market": "on-demand"}
CHOSEN = {
    **{"name": "h100", "zone": "us-west-2c", "instance_types": ["p5.48xlarge"], "gpu": "H100"},
    "reason": "first of --gpu H100,A100",
}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"pool": CHOSEN}, "h100: p5.48xlarge in us-west-2c"),
        ({"pool": {**CHOSEN, "instance_types": []}}, "h100: us-west-2c"),
        ({"pool": {**CHOSEN, "zone": "a, b"}}, "h100: p5.48xlarge in a, b"),
        ({"pool": {**CHOSEN, "zone": 7}}, "h100: p5.48xlarge"),
        ({"pool": CHOSEN, "instances": []}, "h100: p5.48xlarge in us-west-2c"),
        ({"pool": CHOSEN, "instances": None}, "h100: p5.48xlarge in us-west-2c"),
        ({"pool": CHOSEN, "instances": [L4]}, "l4: g6.xlarge in us-west-2a, us-west-2b"),
        ({"instances": [L4, H100, H100]}, "l4, h100: g6.xlarge, p5.48xlarge in us-west-2a, us-west-2b, us-west-2c"),
        ({"cost": {"instances": [H100]}}, "h100: p5.48xlarge in us-west-2c"),
        ({"cost": None, "pool": CHOSEN}, "h100: p5.48xlarge in us-west-2c"),
        ({"instances": [{"instance_type": "g5.xlarge", "market": "spot"}]}, ""),  # of an earlier version
        ({}, ""),
    ],
)
def test_places_are_of_the_instances_or_of_the_choice(document: dict[str, Any], says: str) -> None:
    assert in_words(places_in(document)) == says


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"pool": CHOSEN, "pools": ["l4", "h100"]}, ["l4", "h100"]),
        ({"pools": ["h100", "l4", "h100"]}, ["h100", "l4"]),
        ({}, []),
    ],
)
def test_pools_are_all_that_the_run_has_tried(document: dict[str, Any], names: list[str]) -> None:
    assert pools_in(document) == names


@pytest.mark.parametrize("broken", [7, "x", [], {}, None, True, 1.5, [7], {"x": 7}, [[]]])
@pytest.mark.parametrize("key", ["pool", "pools", "instances", "cost", *(f"pool.{name}" for name in CHOSEN)])
def test_broken_values_are_left_out(key: str, broken: Any) -> None:
    field, _, inner = key.partition(".")
    document = {field: {**CHOSEN, inner: broken} if inner else broken}
    places = places_in(document)
    for names in (places.pools, places.instance_types, places.zones, pools_in(document)):
        assert names is None or all(isinstance(name, str) for name in names)
    assert all(isinstance(of_pool(document, name), str | None) for name in CHOSEN)


def test_reason_is_one_line() -> None:
    assert of_pool({"pool": {"reason": "EC2 has\nno p4d.24xlarge"}}, "reason") == "EC2 has no p4d.24xlarge"
    assert of_pool({"pool": CHOSEN}, "reason") == "first of --gpu H100,A100"
    assert of_pool({}, "reason") is None
