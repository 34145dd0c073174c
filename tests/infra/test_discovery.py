"""The head's name: private, short-lived in caches, and gone without a fuss."""

from __future__ import annotations

import pytest

from infra.discovery import Discovery, DiscoveryArgs, namespace_name
from tests.infra.fake_aws import Cloud


def discovery(cloud: Cloud) -> Discovery:
    """A namespace with valid defaults."""
    return cloud.run(lambda: Discovery("discovery", DiscoveryArgs(vpc_id="vpc-1")))


def test_the_head_is_found_under_a_name_of_the_stack(cloud: Cloud) -> None:
    made = discovery(cloud)
    assert cloud.value(made.head_host) == "head.ray-on-ecs-dev.internal", "two stacks of an account are two names"
    assert cloud.value(made.registry_arn).endswith(":discovery-head"), "the head's service registers here"


def test_the_name_exists_in_the_stacks_network_alone(cloud: Cloud) -> None:
    discovery(cloud)
    assert cloud.resources["discovery-namespace"].inputs["vpc"] == "vpc-1", "nobody else has to find the head"


def test_the_record_leads_to_a_new_head_within_seconds(cloud: Cloud) -> None:
    discovery(cloud)
    config = cloud.resources["discovery-head"].inputs["dnsConfig"]
    assert config == {
        "namespaceId": "discovery-namespace-id",
        "dnsRecords": [{"type": "A", "ttl": 10.0}],
        "routingPolicy": "MULTIVALUE",
    }, "workers that restart would dial the old head for as long as the record lives"


def test_a_late_registration_does_not_block_the_deletion(cloud: Cloud) -> None:
    discovery(cloud)
    assert cloud.resources["discovery-head"].inputs["forceDestroy"] is True, "ECS takes addresses out late"


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ("dev", "ray-on-ecs-dev.internal"),
        ("My_Stack", "ray-on-ecs-my-stack.internal"),
        ("v1.2", "ray-on-ecs-v1.2.internal"),
    ],
)
def test_a_namespace_is_a_host_name_whatever_the_stack_is_called(stack: str, name: str) -> None:
    assert namespace_name("ray-on-ecs", stack) == name, "host names hold letters, digits, hyphens and dots"


def test_a_long_name_is_cut_and_stays_its_own() -> None:
    first, second = (namespace_name("ray-on-ecs", f"{'long-' * 12}{end}") for end in ("a", "b"))
    assert first != second, "two stacks of one network would answer for each other"
    for label in first.split("."):
        assert 0 < len(label) <= 63, "Route 53 refuses a longer one, minutes into `up`"
    assert first.startswith("ray-on-ecs-long-long-"), "people read it"
