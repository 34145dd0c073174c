"""Choices that the state keeps: name, zone and identity."""

from __future__ import annotations

import pytest

from infra.choices import Choices, ChoicesArgs
from tests.infra.fake_aws import Cloud

ZONES = ("us-west-2a", "us-west-2c")


def choices(cloud: Cloud, zones: tuple[str, ...] = ZONES) -> Choices:
    """Choices with valid defaults."""
    args = ChoicesArgs(name="ray-on-ecs-ray", zones=zones, identity={"account": "1"})
    return cloud.run(lambda: Choices("choices", args))


def test_a_rename_changes_no_choice() -> None:
    created = {}
    for stack in ("dev", "prod"):
        cloud = Cloud(stack=stack)
        choices(cloud)
        created[stack] = cloud.resources["choices-id"]
    assert [resource.inputs["prefix"] for resource in created.values()] == [
        "ray-on-ecs-ray-dev-",
        "ray-on-ecs-ray-prod-",
    ]
    assert created["prod"].ignore_changes == ("prefix", "keepers")
    assert created["prod"].inputs["keepers"] == {"account": "1", "zones": "us-west-2a us-west-2c"}


@pytest.mark.parametrize(
    ("end", "zone"), [("c0ffee", "us-west-2a"), ("c0ffed", "us-west-2c"), ("000001", "us-west-2c")]
)
def test_the_random_end_of_the_name_chooses_the_zone(cloud: Cloud, end: str, zone: str) -> None:
    cloud.kept = {"hex": f"ray-on-ecs-ray-dev-{end}"}
    assert cloud.value(choices(cloud).zone) == zone


def test_the_zone_of_the_first_up_is_kept(cloud: Cloud) -> None:
    cloud.kept = {"zones": "us-west-2b us-west-2d"}  # the candidates then
    assert cloud.value(choices(cloud).zone) == "us-west-2b"


def test_an_existing_network_leaves_no_choice(cloud: Cloud) -> None:
    assert cloud.value(choices(cloud, ()).zone) == ""


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ("dev", "dev"),
        ("Team_A.Exp", "team-a-exp"),
        ("a" * 40, "a" * 16),
        ("a-very-long-stac-k", "a-very-long-stac"),
        ("___", "stack"),
    ],
)
def test_the_name_fits_a_dns_label(stack: str, name: str) -> None:
    cloud = Cloud(stack=stack)
    choices(cloud)
    assert cloud.resources["choices-id"].inputs["prefix"] == f"ray-on-ecs-ray-{name}-"
