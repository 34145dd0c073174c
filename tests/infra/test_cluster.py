"""The ECS cluster, its logs, and what is associated with it afterwards."""

from __future__ import annotations

import pytest

from infra.cluster import Cluster, ClusterArgs
from tests.infra.fake_aws import ECS_CLUSTER, Cloud


def cluster(cloud: Cloud, providers: tuple[str, ...] = ()) -> Cluster:
    """A cluster with valid defaults, and what is associated with it."""

    def program() -> Cluster:
        made = Cluster("ray-on-ecs-ray", ClusterArgs(log_retention_days=30))
        if providers:
            made.associate(providers)
        return made

    return cloud.run(program)


def test_logs_do_not_pile_up_for_ever(cloud: Cloud) -> None:
    cluster(cloud)
    assert cloud.resources["ray-logs"].inputs["retentionInDays"] == 30, "CloudWatch keeps them for ever otherwise"


def test_the_cluster_says_its_names(cloud: Cloud) -> None:
    made = cluster(cloud)
    assert cloud.value(made.ref.name) == "ray-on-ecs-ray-dev-c0ffee", "instances join by name"
    assert cloud.value(made.ref.arn) == ECS_CLUSTER, "services are created by ARN"
    assert cloud.value(made.logs.name) == "ray-on-ecs-ray-logs", "containers write by name"
    assert cloud.value(made.logs.arn).endswith(":ray-on-ecs-ray-logs"), "policies allow by ARN"


def test_the_cluster_keeps_its_name_when_the_stack_is_renamed() -> None:
    made = {}
    for stack in ("dev", "prod"):
        cloud = Cloud(stack=stack)
        cluster(cloud)
        made[stack] = cloud.resources["ray-suffix"]
    assert made["dev"].name == made["prod"].name
    assert [each.inputs["prefix"] for each in made.values()] == ["dev-", "prod-"], "people read the stack's name in it"
    assert made["prod"].ignore_changes == ("prefix", "keepers"), "another prefix would replace the cluster"


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
    cluster(cloud)
    assert cloud.resources["ray-suffix"].inputs["prefix"] == f"{name}-"


def test_tasks_are_counted(cloud: Cloud) -> None:
    cluster(cloud)
    settings = cloud.resources["ray-cluster"].inputs["settings"]
    assert settings == [{"name": "containerInsights", "value": "enabled"}], "alarms and scaling read these numbers"


def test_the_log_group_that_container_insights_would_make_is_the_stacks(cloud: Cloud) -> None:
    cluster(cloud)
    insights = cloud.resources["ray-insights"].inputs
    assert insights["name"] == "/aws/ecs/containerinsights/ray-on-ecs-ray-dev-c0ffee/performance", (
        "ECS looks for this name"
    )
    assert insights["retentionInDays"] == 30
    assert "ray-suffix" in cloud.needs("ray-insights"), "one that comes back would be in the way of the next `up`"
    assert "ray-insights" in cloud.resources["ray-cluster"].dependencies, (
        "destroyed before the cluster, it would be made anew by what the cluster still writes, and stay"
    )


def test_capacity_providers_are_associated_by_name(cloud: Cloud) -> None:
    cluster(cloud, ("head", "workers"))
    association = cloud.resources["ray-capacity-providers"]
    assert association.inputs == {
        "clusterName": "ray-on-ecs-ray-dev-c0ffee",
        "capacityProviders": ["head", "workers"],
    }, "by ARN ECS finds no instance in them"
    assert association.parent == "ray", "it belongs to the cluster"
    assert "ray-cluster" in association.dependencies, "the cluster has to exist first"


def test_a_cluster_without_association_has_none(cloud: Cloud) -> None:
    cluster(cloud)
    assert cloud.of_type("aws:ecs/clusterCapacityProviders:ClusterCapacityProviders") == [], "providers come later"
