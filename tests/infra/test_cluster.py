"""ECS cluster, log groups and capacity provider association."""

from __future__ import annotations

from infra.cluster import Cluster, ClusterArgs
from infra.config.services import end_services
from tests.infra.fake_aws import REGION, Cloud


def cluster(cloud: Cloud, providers: tuple[str, ...] = ()) -> Cluster:
    """A cluster with valid defaults, and what is associated with it."""

    def program() -> Cluster:
        made = Cluster("ray-on-ecs-ray", ClusterArgs(name="ray-on-ecs-ray-dev-c0ffee", log_retention_days=30))
        if providers:
            made.associate(providers, end_services(REGION))
        return made

    return cloud.run(program)


def test_logs_do_not_pile_up_for_ever(cloud: Cloud) -> None:
    cluster(cloud)
    assert cloud.resources["ray-logs"].inputs["retentionInDays"] == 30


def test_tasks_are_counted(cloud: Cloud) -> None:
    cluster(cloud)
    settings = cloud.resources["ray-cluster"].inputs["settings"]
    assert settings == [{"name": "containerInsights", "value": "enabled"}]


def test_container_insights_log_group_belongs_to_the_stack(cloud: Cloud) -> None:
    cluster(cloud)
    insights = cloud.resources["ray-insights"].inputs
    assert insights["name"] == "/aws/ecs/containerinsights/ray-on-ecs-ray-dev-c0ffee/performance"
    assert insights["retentionInDays"] == 30
    assert "ray-insights" in cloud.resources["ray-cluster"].dependencies


def test_capacity_providers_are_associated_by_name(cloud: Cloud) -> None:
    cluster(cloud, ("head", "workers"))
    association = cloud.resources["ray-capacity-providers"]
    assert association.inputs == {
        "clusterName": "ray-on-ecs-ray-dev-c0ffee",
        "capacityProviders": ["head", "workers"],
    }
    assert association.parent == "ray"
    assert len(association.before_update) == 1
    assert "ray-cluster" in association.dependencies
