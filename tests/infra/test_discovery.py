"""Service discovery of the head: private DNS name and TTL."""

from __future__ import annotations

from infra.discovery import Discovery, DiscoveryArgs
from tests.infra.fake_aws import Cloud


def discovery(cloud: Cloud) -> Discovery:
    """A namespace with valid defaults."""
    return cloud.run(lambda: Discovery("discovery", DiscoveryArgs(namespace="ray-c0ffee", vpc_id="vpc-1")))


def test_the_name_exists_in_the_stacks_network_alone(cloud: Cloud) -> None:
    discovery(cloud)
    assert cloud.resources["discovery-namespace"].inputs["vpc"] == "vpc-1"


def test_dns_record_has_a_short_ttl(cloud: Cloud) -> None:
    discovery(cloud)
    config = cloud.resources["discovery-head"].inputs["dnsConfig"]
    assert config == {
        "namespaceId": "discovery-namespace-id",
        "dnsRecords": [{"type": "A", "ttl": 10.0}],
        "routingPolicy": "MULTIVALUE",
    }


def test_a_late_registration_does_not_block_the_deletion(cloud: Cloud) -> None:
    discovery(cloud)
    assert cloud.resources["discovery-head"].inputs["forceDestroy"] is True
