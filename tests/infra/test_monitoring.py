"""CloudWatch dashboard, alarms and budget."""

from __future__ import annotations

import json

import pytest

from infra.definitions import dashboard
from infra.monitoring import Monitoring, MonitoringArgs
from infra.types import ServiceRef
from tests.infra.fake_aws import REGION, Cloud, later
from tests.infra.test_node_scaling import value

SERVICES = {"head": "ray-head", "workers": "ray-workers"}
BODY = dashboard.body(region=REGION, namespace="ray-on-ecs/ray", cluster="ray", services=SERVICES)


def monitoring(cloud: Cloud, email: str = "", partition: str = "aws", **more: str) -> Cloud:
    """Monitoring with valid defaults."""

    def program() -> None:
        cluster, head, workers = (later(item) for item in ("ray", *SERVICES.values()))
        args = MonitoringArgs(
            region=REGION,
            partition=partition,
            services={
                "head": ServiceRef(cluster=cluster, name=head),
                "workers": ServiceRef(cluster=cluster, name=workers),
            },
            alert_email=email,
            monthly_budget_usd=500,
            sleeping_group=more.get("sleeping_group"),
        )
        Monitoring(more.get("name", "monitoring"), args)

    cloud.run(program)
    return cloud


def lines() -> dict[str, list[list]]:
    """The lines of every graph, by its title."""
    return {widget["properties"]["title"]: widget["properties"]["metrics"] for widget in BODY["widgets"]}


@pytest.mark.parametrize(
    ("namespace", "metric"),
    [
        *(("ray-on-ecs/ray", name) for name in ("TrainLoss", "TestLoss", "TestAccuracy", "SamplesPerSecond")),
        *(("ray-on-ecs/ray", name) for name in ("GPUUtilization", "GPUMemoryUtilization", "GPUs")),
        *(("ray-on-ecs/ray", name) for name in ("GPUsUsed", "GPUsRequested")),
        *(("ECS/ContainerInsights", name) for name in ("RunningTaskCount", "DesiredTaskCount")),
        *(("ECS/ContainerInsights", name) for name in ("NetworkRxBytes", "NetworkTxBytes")),
        *(("AWS/ECS", name) for name in ("CPUUtilization", "MemoryUtilization")),
    ],
)
def test_the_dashboard_shows(namespace: str, metric: str) -> None:
    shown = {(line[0], line[1]) for graph in lines().values() for line in graph}
    assert (namespace, metric) in shown


def test_graphs_go_by_service_and_never_by_instance() -> None:
    for title, graph in lines().items():
        for namespace, _, *dimensions, _ in graph:
            if namespace == "ray-on-ecs/ray":
                assert dimensions == [], title
            else:
                assert dimensions[:3] == ["ClusterName", "ray", "ServiceName"], title


def test_graphs_lie_side_by_side() -> None:
    places = {(widget["x"], widget["y"]) for widget in BODY["widgets"]}
    assert len(places) == len(BODY["widgets"]) == 9
    assert max(widget["x"] + widget["width"] for widget in BODY["widgets"]) == 24


def test_the_dashboard_is_deployed_as_it_is_tested(cloud: Cloud) -> None:
    resources = monitoring(cloud).resources["monitoring-dashboard"].inputs
    assert json.loads(resources["dashboardBody"]) == BODY
    assert resources["dashboardName"] == "ray"


def test_a_silent_head_raises_the_alarm(cloud: Cloud) -> None:
    alarm = monitoring(cloud).resources["monitoring-head-alarm"].inputs
    assert (alarm["namespace"], alarm["metricName"]) == ("ray-on-ecs/ray", "GPUs")
    assert (alarm["comparisonOperator"], alarm["threshold"]) == ("LessThanThreshold", 0)
    assert alarm["treatMissingData"] == "breaching"
    assert alarm["period"] * alarm["evaluationPeriods"] == 15 * 60


@pytest.mark.parametrize(
    ("published", "wanted", "is_silent"),
    [
        (None, 0, False),  # asleep
        (None, 1, True),  # silent, still starting, or in the 15 minutes before its instance ends
        (0, 1, False),  # without workers
        (8, 1, False),
        (0, 0, False),  # its instance is about to end
        (None, None, False),
        (8, None, False),
    ],
)
def test_head_that_sleeps_is_not_silent(
    cloud: Cloud, published: int | None, wanted: int | None, is_silent: bool
) -> None:
    resources = monitoring(cloud, sleeping_group="head-group", name="scaling")
    silence = value(resources, "head", published=published, wanted=wanted)
    assert (silence is not None and silence < 0) == is_silent


def test_silence_is_longer_than_a_sleeping_heads_instance(cloud: Cloud) -> None:
    alarm = monitoring(cloud, email="team@example.com", sleeping_group="head-group").resources["monitoring-head-alarm"]
    given = alarm.inputs
    assert (given["comparisonOperator"], given["threshold"]) == ("LessThanThreshold", 0)
    assert given["treatMissingData"] == "notBreaching"
    _, published, wanted = given["metricQueries"]
    assert wanted["metric"]["dimensions"] == {"AutoScalingGroupName": "head-group"}
    assert published["metric"]["metricName"] == "GPUNodesInUse", "users publish GPUs"
    [period] = {each["metric"]["period"] for each in (published, wanted)}
    assert period * given["evaluationPeriods"] == 30 * 60
    assert given["alarmActions"]


def test_idle_gpus_alarm(cloud: Cloud) -> None:
    alarm = monitoring(cloud).resources["monitoring-gpus-alarm"].inputs
    assert (alarm["namespace"], alarm["metricName"]) == ("ray-on-ecs/ray", "GPUUtilization")
    assert (alarm["statistic"], alarm["threshold"]) == ("Maximum", 5)
    assert alarm["period"] * alarm["evaluationPeriods"] == 30 * 60
    assert alarm["treatMissingData"] == "notBreaching"


def test_without_an_address_nobody_is_written_to(cloud: Cloud) -> None:
    made = {resource.type for resource in monitoring(cloud).resources.values()}
    assert not made & {"aws:sns/topic:Topic", "aws:budgets/budget:Budget"}


def test_alarms_and_costs_reach_the_address(cloud: Cloud) -> None:
    monitoring(cloud, email="team@example.com")
    subscription = cloud.resources["monitoring-email"].inputs
    assert (subscription["protocol"], subscription["endpoint"]) == ("email", "team@example.com")
    alarms = cloud.of_type("aws:cloudwatch/metricAlarm:MetricAlarm")
    assert len(alarms) == 2
    for alarm in alarms:
        assert alarm.inputs["alarmActions"] == [subscription["topic"]], alarm.name
    budget = cloud.resources["monitoring-budget"].inputs
    assert (budget["limitAmount"], budget["limitUnit"], budget["timeUnit"]) == ("500", "USD", "MONTHLY")
    told = {(item["notificationType"], item["threshold"]) for item in budget["notifications"]}
    assert told == {("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)}
    assert all(item["subscriberEmailAddresses"] == ["team@example.com"] for item in budget["notifications"])


@pytest.mark.parametrize("partition", ["aws-us-gov", "aws-cn", "aws-eusc"])
def test_without_budgets_in_usd_alarms_stay(cloud: Cloud, partition: str) -> None:
    monitoring(cloud, email="team@example.com", partition=partition)
    assert not cloud.of_type("aws:budgets/budget:Budget")
    assert cloud.resources["monitoring-head-alarm"].inputs["alarmActions"]
    assert cloud.messages == [f"no AWS budget is created, since {partition} has none in USD; alarms are sent"]


def test_cpu_workers_have_a_graph_of_their_own() -> None:
    services = {**SERVICES, "cpu-workers": "ray-cpu-workers"}
    body = dashboard.body(region=REGION, namespace="ray-on-ecs/ray", cluster="ray", services=services)
    assert [widget["properties"]["title"] for widget in body["widgets"][9:]] == ["CPUs of the CPU workers"]
    tasks = next(item for item in body["widgets"] if item["properties"]["title"] == "Tasks")["properties"]["metrics"]
    assert {line[5] for line in tasks} == {"ray-head", "ray-workers", "ray-cpu-workers"}


def test_other_node_groups_have_lines_and_one_graph() -> None:
    services = {
        **SERVICES,
        **{kind: f"ray-{kind}" for kind in ("workers-b", "cpu-workers", "h100-workers", "prep-workers")},
    }
    body = dashboard.body(region=REGION, namespace="ray-on-ecs/ray", cluster="ray", services=services)
    graphs = {widget["properties"]["title"]: widget["properties"]["metrics"] for widget in body["widgets"]}
    assert "GPUs of workers" in graphs
    assert [*graphs][9:] == ["CPUs of the CPU workers", "GPUs and CPUs of the other node groups"]
    [[search]] = graphs["GPUs and CPUs of the other node groups"]
    assert search["expression"] == (
        'SEARCH(\'{"ray-on-ecs/ray",Workers} '
        'MetricName=("GPUs" OR "GPUsRequested" OR "CPUs" OR "CPUsRequested")\', \'Maximum\')'
    )
    network = [line[-1]["label"] for line in graphs["Network of the workers"]]
    ways = ("received", "sent")
    kinds = ("workers-b", "h100-workers", "prep-workers")
    assert network == [*ways, *(f"{kind}, {way}" for kind in kinds for way in ways)]
    assert {line[5] for line in graphs["Tasks"]} == set(services.values())
