"""CloudWatch dashboard and alarms, an SNS topic for email, and an optional AWS budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import dashboard
from infra.definitions.metrics import Metric, of_group
from infra.scaling import queries
from infra.tags import metrics_namespace
from infra.types import ServiceRef

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
    alert_email: str
    monthly_budget_usd: int
    sleeping_group: pulumi.Input[str] | None = None


class Monitoring(pulumi.ComponentResource):
    """Dashboard, and alarms for a silent head and for idle GPUs."""

    dashboard_name: pulumi.Output[str]

    def __init__(self, name: str, args: MonitoringArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Monitoring", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        cluster = args.services["head"].cluster
        self._actions = [self._topic(name, args.alert_email).arn] if args.alert_email else []
        self._alarm_head_silent(f"{name}-head", cluster, args.sleeping_group)
        # The head publishes no utilization while the cluster has no GPUs, so missing data is not an alarm.
        self._alarm(
            f"{name}-gpus",
            f"All GPUs of the Ray cluster idle for {GPUS_IDLE_MINUTES} minutes",
            watched=_watched(_own("GPUUtilization", cluster)),
            threshold=IDLE_PERCENT,
            minutes=GPUS_IDLE_MINUTES,
        )
        if args.alert_email:
            self._budget(name, args)
        self.dashboard_name = self._dashboard(name, args, cluster).dashboard_name
        self.register_outputs({"dashboard_name": self.dashboard_name})

    def _topic(self, name: str, email: str) -> aws.sns.Topic:
        topic = aws.sns.Topic(f"{name}-alerts", opts=self._child)
        aws.sns.TopicSubscription(f"{name}-email", topic=topic.arn, protocol="email", endpoint=email, opts=self._child)
        return topic

    def _budget(self, name: str, args: MonitoringArgs) -> None:
        if args.partition != BUDGETS_IN_USD:
            pulumi.log.info(f"no AWS budget is created, since {args.partition} has none in USD; alarms are sent")
            return
        # Of the whole account: AWS Budgets can filter by a tag only after it is activated for cost allocation.
        # https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/activating-tags.html
        aws.budgets.Budget(
            f"{name}-budget",
            budget_type="COST",
            limit_amount=str(args.monthly_budget_usd),
            limit_unit="USD",
            time_unit="MONTHLY",
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    notification_type=kind,
                    threshold=percent,
                    threshold_type="PERCENTAGE",
                    subscriber_email_addresses=[args.alert_email],
                )
                for kind, percent in (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))
            ],
            opts=self._child,
        )

    def _alarm_head_silent(
        self, name: str, cluster: pulumi.Output[str], sleeping_group: pulumi.Input[str] | None
    ) -> None:
        """Alarm for a running head: while it is silent, idle workers are not stopped, since it may have a run."""
        if sleeping_group is None:
            minutes = HEAD_SILENT_MINUTES
            description = f"Ray head silent for {minutes} minutes: not running, or unable to publish metrics"
            watched, missing = _watched(_own("GPUs", cluster)), "breaching"
        else:
            minutes, missing = SLEEPING_HEAD_SILENT_MINUTES, "notBreaching"
            description = f"Ray head silent for {minutes} minutes, and not asleep"
            wanted = replace(of_group(sleeping_group)["wanted"], stat="Minimum")
            # Users publish `GPUs` while the head sleeps (ray_on_ecs/cluster/wake.py), and this metric the head alone.
            metrics = {"published": _own("GPUNodesInUse", cluster), "wanted": wanted}
            # MAX skips a missing value: -1 if the head publishes nothing while it has, or wants, an instance.
            expression = "IF(wanted > 0, MAX([published, wanted * 0 - 1]), 0)"
            watched = {"metric_queries": queries(expression, description, metrics, period_seconds=PERIOD_SECONDS)}
        self._alarm(name, description, watched=watched, threshold=0, minutes=minutes, missing=missing)

    def _alarm(
        self,
        name: str,
        description: str,
        *,
        watched: dict[str, Any],
        threshold: int,
        minutes: int,
        missing: str = "notBreaching",
    ) -> None:
        aws.cloudwatch.MetricAlarm(
            f"{name}-alarm",
            alarm_description=description,
            **watched,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            comparison_operator="LessThanThreshold",
            threshold=threshold,
            treat_missing_data=missing,
            alarm_actions=self._actions,
            opts=self._child,
        )

    def _dashboard(self, name: str, args: MonitoringArgs, cluster: pulumi.Output[str]) -> aws.cloudwatch.Dashboard:
        body = pulumi.Output.all(
            namespace=metrics_namespace(cluster),
            cluster=cluster,
            services={kind: service.name for kind, service in args.services.items()},
        ).apply(lambda values: json.dumps(dashboard.body(region=args.region, **values)))
        # CloudWatch requires a name, and the cluster's is unique.
        return aws.cloudwatch.Dashboard(
            f"{name}-dashboard", dashboard_name=cluster, dashboard_body=body, opts=self._child
        )


def _own(name: str, cluster: pulumi.Output[str]) -> Metric:
    """Metric of the cluster's own namespace."""
    return Metric(namespace=metrics_namespace(cluster), name=name, stat="Maximum")


def _watched(metric: Metric) -> dict[str, Any]:
    """Arguments of an alarm on one metric."""
    return {
        "namespace": metric.namespace,
        "metric_name": metric.name,
        "statistic": metric.stat,
        "dimensions": metric.dimensions,
        "period": PERIOD_SECONDS,
    }
