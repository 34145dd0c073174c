"""Application Auto Scaling of an ECS service's number of tasks, and alarms on metric math."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
import pulumi_aws as aws

from infra.definitions.metrics import Metric
from infra.types import ResourceRef, ServiceRef

# The default of five minutes would delay the next change.
COOLDOWN_SECONDS = 60
PERIOD_SECONDS = 60
Step = aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs
Query = aws.cloudwatch.MetricAlarmMetricQueryArgs


def scalable_target(
    name: str, service: ServiceRef, *, fewest: int, most: int, parent: pulumi.Resource
) -> aws.appautoscaling.Target:
    """Service as a scalable target, with the bounds of its number of tasks."""
    return aws.appautoscaling.Target(
        f"{name}-target",
        service_namespace="ecs",
        scalable_dimension="ecs:service:DesiredCount",
        resource_id=pulumi.Output.concat("service/", service.cluster, "/", service.name),
        min_capacity=fewest,
        max_capacity=most,
        opts=pulumi.ResourceOptions(parent=parent),
    )


def step_policy(
    name: str, target: aws.appautoscaling.Target, steps: Sequence[Step], *, parent: pulumi.Resource
) -> aws.appautoscaling.Policy:
    """Policy that sets the number of tasks of the step with the alarm's value."""
    return aws.appautoscaling.Policy(
        f"{name}-policy",
        policy_type="StepScaling",
        service_namespace=target.service_namespace,
        scalable_dimension=target.scalable_dimension,
        resource_id=target.resource_id,
        step_scaling_policy_configuration=aws.appautoscaling.PolicyStepScalingPolicyConfigurationArgs(
            # Unlike a change in capacity, an exact capacity can be applied again while instances are starting.
            adjustment_type="ExactCapacity",
            cooldown=COOLDOWN_SECONDS,
            metric_aggregation_type="Maximum",
            step_adjustments=steps,
        ),
        opts=pulumi.ResourceOptions(parent=parent, depends_on=[target]),
    )


def group_policy(
    name: str,
    group: ResourceRef,
    capacity: int,
    *,
    above: str | None = None,
    below: str | None = None,
    opts: pulumi.ResourceOptions,
) -> aws.autoscaling.Policy:
    """Policy that sets the capacity of an Auto Scaling group, for a metric between bounds relative to the threshold."""
    return aws.autoscaling.Policy(
        f"{name}-policy",
        autoscaling_group_name=group.name,
        policy_type="StepScaling",
        adjustment_type="ExactCapacity",
        metric_aggregation_type="Maximum",
        step_adjustments=[
            {
                "metric_interval_lower_bound": above,
                "metric_interval_upper_bound": below,
                "scaling_adjustment": capacity,
            }
        ],
        opts=opts,
    )


def queries(
    expression: str, label: str, metrics: Mapping[str, Metric], *, period_seconds: int = PERIOD_SECONDS
) -> list[Query]:
    """Queries of an alarm: an expression as its result, and the metrics by their names in it."""
    variables = [
        Query(
            id=name,
            metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
                namespace=metric.namespace,
                metric_name=metric.name,
                stat=metric.stat,
                period=period_seconds,
                dimensions=metric.dimensions,
            ),
        )
        for name, metric in metrics.items()
    ]
    return [Query(id="result", expression=expression, label=label, return_data=True), *variables]
