"""CloudWatch dashboard and alarms, an SNS topic for email, and an optional AWS budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import dashboard
from infra.definitions.metrics import AUTO_SCALING, Metric
from infra.scaling import queries
from infra.tags import metrics_namespace
from infra.types import Alerts, ServiceRef

PERIOD_SECONDS = 300
# Starting the head's instance and pulling its image takes some minutes.
HEAD_SILENT_MINUTES = 15
# The instance of a head that has gone to sleep runs for 15 to 20 minutes.
SLEEPING_HEAD_SILENT_MINUTES = 30
GPUS_IDLE_MINUTES = 30
IDLE_PERCENT = 5
# GovCloud's costs are in its standard account, China's in CNY.
# https://docs.aws.amazon.com/govcloud-us/latest/UserGuide/usage-and-payment.html
BUDGETS_IN_USD = "aws"


@dataclass(frozen=True, kw_only=True)
class MonitoringArgs:
    """Inputs of Monitoring: the ECS services by kind, e.g. "head", "workers" and "h100-workers".

    Without an email address neither topic nor budget is created. `sleeping_group` is the Auto Scaling group of a head
    that sleeps.
    """

    region: str
    partition: str = "aws"
    services: Mapping[str, ServiceRef]
    alerts: Alerts
    sleeping_group: pulumi.Input[str] | None = None

    @property
    def head(self) -> ServiceRef:
        """The head's service."""
        return self.services["head"]


class Monitoring(pulumi.ComponentResource):
    """Dashboard, and alarms for a silent head and for idle GPUs."""

    dashboard_name: pulumi.Output[str]

    def __init__(self, name: str, args: MonitoringArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Monitoring", name, None, opts)
        actions = self._alarm_actions(name, args.alerts)
        self._alarm_head_silent(name, args, actions)
        self._alarm_gpus_idle(name, args, actions)
        if args.alerts.email:
            self._budget(name, args)
        self.dashboard_name = self._dashboard(name, args).dashboard_name
        self.register_outputs({"dashboard_name": self.dashboard_name})

    def _alarm_actions(self, name: str, alerts: Alerts) -> list[pulumi.Input[str]]:
        """SNS topic of the alarms, if there is an email address."""
        if not alerts.email:
            return []
        topic = aws.sns.Topic(f"{name}-alerts", opts=pulumi.ResourceOptions(parent=self))
        aws.sns.TopicSubscription(
            f"{name}-email",
            topic=topic.arn,
            protocol="email",
            endpoint=alerts.email,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return [topic.arn]

    def _budget(self, name: str, args: MonitoringArgs) -> None:
        alerts = args.alerts
        if args.partition != BUDGETS_IN_USD:
            pulumi.log.info(f"no AWS budget is created, since {args.partition} has none in USD; alarms are sent")
            return
        # Of the whole account: AWS Budgets can filter by a tag only after it is activated for cost allocation.
        # https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/activating-tags.html
        aws.budgets.Budget(
            f"{name}-budget",
            budget_type="COST",
            limit_amount=str(alerts.monthly_usd),
            limit_unit="USD",
            time_unit="MONTHLY",
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    notification_type=kind,
                    threshold=percent,
                    threshold_type="PERCENTAGE",
                    subscriber_email_addresses=[alerts.email],
                )
                for kind, percent in (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))
            ],
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _alarm_head_silent(self, name: str, args: MonitoringArgs, actions: list[pulumi.Input[str]]) -> None:
        # While a running head is silent, idle workers are not stopped, since it may have a run.
        metric = Metric(namespace=metrics_namespace(args.head.cluster), name="GPUs", stat="Maximum")
        watched, minutes, missing = _watched(metric), HEAD_SILENT_MINUTES, "breaching"
        description = f"Ray head silent for {minutes} minutes: not running, or unable to publish metrics"
        if args.sleeping_group is not None:
            group = {"AutoScalingGroupName": args.sleeping_group}
            wanted = Metric(namespace=AUTO_SCALING, name="GroupDesiredCapacity", stat="Minimum", dimensions=group)
            # Users publish `GPUs` while the head sleeps (ray_on_ecs/cluster/wake.py), and this metric the head alone.
            metric = Metric(namespace=metrics_namespace(args.head.cluster), name="GPUNodesInUse", stat="Maximum")
            minutes, missing = SLEEPING_HEAD_SILENT_MINUTES, "notBreaching"
            description = f"Ray head silent for {minutes} minutes, and not asleep"
            # MAX skips a missing value: -1 if the head publishes nothing while it has, or wants, an instance.
            expression = "IF(wanted > 0, MAX([published, wanted * 0 - 1]), 0)"
            metrics = {"published": metric, "wanted": wanted}
            watched = {"metric_queries": queries(expression, description, metrics, period_seconds=PERIOD_SECONDS)}
        self._alarm(
            f"{name}-head",
            description,
            watched=watched,
            below=0,
            minutes=minutes,
            missing=missing,
            actions=actions,
        )

    def _alarm_gpus_idle(self, name: str, args: MonitoringArgs, actions: list[pulumi.Input[str]]) -> None:
        # The head publishes no utilization while the cluster has no GPUs, so missing data is not an alarm.
        self._alarm(
            f"{name}-gpus",
            f"All GPUs of the Ray cluster idle for {GPUS_IDLE_MINUTES} minutes",
            watched=_watched(
                Metric(namespace=metrics_namespace(args.head.cluster), name="GPUUtilization", stat="Maximum")
            ),
            below=IDLE_PERCENT,
            minutes=GPUS_IDLE_MINUTES,
            missing="notBreaching",
            actions=actions,
        )

    def _alarm(
        self,
        name: str,
        description: str,
        *,
        watched: dict[str, Any],
        below: int,
        minutes: int,
        missing: str,
        actions: list[pulumi.Input[str]],
    ) -> None:
        aws.cloudwatch.MetricAlarm(
            f"{name}-alarm",
            alarm_description=description,
            **watched,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            comparison_operator="LessThanThreshold",
            threshold=below,
            treat_missing_data=missing,
            alarm_actions=actions,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _dashboard(self, name: str, args: MonitoringArgs) -> aws.cloudwatch.Dashboard:
        names = pulumi.Output.all(
            namespace=metrics_namespace(args.head.cluster),
            cluster=args.head.cluster,
            services=pulumi.Output.all(**{kind: service.name for kind, service in args.services.items()}),
        )
        body = names.apply(lambda values: json.dumps(dashboard.body(region=args.region, **values)))
        return aws.cloudwatch.Dashboard(
            f"{name}-dashboard",
            # CloudWatch requires a name, and the cluster's is unique.
            dashboard_name=args.head.cluster,
            dashboard_body=body,
            opts=pulumi.ResourceOptions(parent=self),
        )


def _watched(metric: Metric) -> dict[str, Any]:
    """Arguments of an alarm on one metric."""
    return {
        "namespace": metric.namespace,
        "metric_name": metric.name,
        "statistic": metric.stat,
        "dimensions": metric.dimensions,
        "period": PERIOD_SECONDS,
    }
