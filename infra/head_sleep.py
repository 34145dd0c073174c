"""Sleep and wake of the head: an alarm on its idle time stops its task, and one on requests starts task and instance.

ECS's managed scaling ends the instance of a head that sleeps (infra/node_group.py). It would start one, too, but a
minute or two later than the wake alarm does. Of the policies of a group, the largest capacity wins.
https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-scale-based-on-demand.html#multiple-scaling-policy-resolution
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import sleep
from infra.scaling import Step, group_policy, queries, scalable_target, step_policy
from infra.tags import metrics_namespace
from infra.types import ResourceRef, ServiceRef


@dataclass(frozen=True, kw_only=True)
class HeadSleepArgs:
    """Inputs of HeadSleep: the head's ECS service and Auto Scaling group, and the idle time before it sleeps.

    `start_arns` are policies of what has to start with the head.
    """

    service: ServiceRef
    group: ResourceRef
    after_minutes: int
    start_arns: Sequence[pulumi.Input[str]] = ()


class HeadSleep(pulumi.ComponentResource):
    """Scaling policies between no head and one, and the two alarms that apply them."""

    def __init__(self, name: str, args: HeadSleepArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:HeadSleep", name, None, opts)
        self._args = args
        self._metrics = sleep.metrics(metrics_namespace(args.service.cluster))
        self._target = scalable_target(name, args.service, fewest=0, most=1, parent=self)
        self._sleep_alarm(name)
        self._wake_alarm(name)
        self.register_outputs({})

    def _sleep_alarm(self, name: str) -> None:
        minutes = self._args.after_minutes
        description = f"Ray head idle for {minutes} minutes (sleep)"
        period = sleep.SLEEP_PERIOD_SECONDS
        aws.cloudwatch.MetricAlarm(
            f"{name}-sleep-alarm",
            name=pulumi.Output.concat(self._args.service.cluster, "-head-sleep"),
            alarm_description=description,
            comparison_operator="GreaterThanOrEqualToThreshold",
            threshold=minutes,
            evaluation_periods=1,
            metric_queries=queries(sleep.IDLE_MINUTES, description, self._metrics, period_seconds=period),
            treat_missing_data="notBreaching",
            alarm_actions=[self._count_policy(f"{name}-sleep", 0).arn],
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _wake_alarm(self, name: str) -> None:
        requested = self._metrics["requested"]
        # Depends on the service, so that ECS has added its scaling policy to the group before: ECS advises against
        # others there, and may not add its policy beside them.
        # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/cluster-auto-scaling.html
        # https://github.com/aws/containers-roadmap/issues/1689
        after = pulumi.ResourceOptions(parent=self, depends_on=[self._target])
        instance = group_policy(f"{name}-instance", self._args.group, 1, above="0", opts=after)
        aws.cloudwatch.MetricAlarm(
            f"{name}-wake-alarm",
            name=pulumi.Output.concat(self._args.service.cluster, "-head-wake"),
            alarm_description="Ray head requested (wake)",
            namespace=requested.namespace,
            metric_name=requested.name,
            statistic=requested.stat,
            period=sleep.WAKE_PERIOD_SECONDS,
            comparison_operator="GreaterThanOrEqualToThreshold",
            threshold=1,
            evaluation_periods=sleep.WAKE_POINTS,
            datapoints_to_alarm=1,
            treat_missing_data="notBreaching",
            alarm_actions=[self._count_policy(f"{name}-wake", 1).arn, instance.arn, *self._args.start_arns],
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _count_policy(self, name: str, count: int) -> aws.appautoscaling.Policy:
        step = Step(metric_interval_lower_bound="0", scaling_adjustment=count)
        return step_policy(name, self._target, [step], parent=self)
