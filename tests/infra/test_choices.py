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
    made = {}
    for stack in ("dev", "prod"):
        cloud = Cloud(stack=stack)
        choices(cloud)
        made[stack] = cloud.resources["choices-cluster"]
    assert [resource.inputs["prefix"] for resource in made.values()] == ["ray-on-ecs-ray-dev-", "ray-on-ecs-ray-prod-"]
    assert made["prod"].ignore_changes == ("prefix", "keepers")
    assert made["prod"].inputs["keepers"] == {"account": "1"}


def test_one_zone_is_chosen_and_kept(cloud: Cloud) -> None:
    cloud.kept = {"zone": "us-west-2b"}  # of the first `up`, when it was one of the candidates
    assert cloud.value(choices(cloud).zone) == "us-west-2b"
    zone = cloud.resources["choices-zone"]
    assert zone.inputs == {"inputs": list(ZONES), "resultCount": 1}
    assert zone.ignore_changes == ("inputs",)


def test_an_existing_network_leaves_no_choice(cloud: Cloud) -> None:
    choices(cloud, ())
    assert "choices-zone" not in cloud.resources


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
    assert cloud.resources["choices-cluster"].inputs["prefix"] == f"ray-on-ecs-ray-{name}-"
