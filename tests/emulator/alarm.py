"""Alarms of the emulated AWS: the numbers of tasks and instances that their scaling policies set."""

from __future__ import annotations

from typing import Any

import boto3


def numbers() -> dict[str, int]:
    """Desired numbers of scalable ECS services, and of their Auto Scaling groups with managed scaling, by name."""
    targets = boto3.client("application-autoscaling").describe_scalable_targets(ServiceNamespace="ecs")
    found = {}
    for target in targets["ScalableTargets"]:
        service = _service(target["ResourceId"])
        found[service["serviceName"]] = service["desiredCount"]
        if group := _group(service):
            found[group["AutoScalingGroupName"]] = group["DesiredCapacity"]
    return found


def ring(alarm: str) -> None:
    """Apply the policies of the alarm whose name ends in this way, and ECS's managed scaling after it."""
    alarms = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    [actions] = [each["AlarmActions"] for each in alarms if each["AlarmName"].endswith(f"-{alarm}")]
    of_tasks = boto3.client("application-autoscaling").describe_scaling_policies(ServiceNamespace="ecs")
    for policy in of_tasks["ScalingPolicies"]:
        if policy["PolicyARN"] in actions:
            _set_tasks(policy["ResourceId"], _number(policy["StepScalingPolicyConfiguration"]))
    for policy in boto3.client("autoscaling").describe_policies()["ScalingPolicies"]:
        if policy["PolicyARN"] in actions:
            _set_instances(policy["AutoScalingGroupName"], _number(policy))


def _set_tasks(target: str, number: int) -> None:
    """Set the number of a service's tasks, and in the end that of its instances."""
    service = _service(target)
    name, cluster = service["serviceName"], service["clusterArn"]
    boto3.client("ecs").update_service(cluster=cluster, service=name, desiredCount=number)
    if group := _group(service):
        _set_instances(group["AutoScalingGroupName"], number)


def _set_instances(group: str, number: int) -> None:
    boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=number)


def _number(policy: dict[str, Any]) -> int:
    assert policy["AdjustmentType"] == "ExactCapacity"
    [step] = policy["StepAdjustments"]
    return step["ScalingAdjustment"]


def _service(target: str) -> dict[str, Any]:
    _, cluster, name = target.split("/")
    [service] = boto3.client("ecs").describe_services(cluster=cluster, services=[name])["services"]
    return service


def _group(service: dict[str, Any]) -> dict[str, Any] | None:
    """The Auto Scaling group of a service whose capacity provider has managed scaling."""
    names = [each["capacityProvider"] for each in service["capacityProviderStrategy"]]
    [provider] = boto3.client("ecs").describe_capacity_providers(capacityProviders=names)["capacityProviders"]
    of_group = provider["autoScalingGroupProvider"]
    if of_group["managedScaling"]["status"] != "ENABLED":
        return None
    name = of_group["autoScalingGroupArn"].rpartition("/")[2]
    [group] = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])[
        "AutoScalingGroups"
    ]
    return group
