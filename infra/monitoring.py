"""What shows how the cluster does, and who hears of it: a dashboard, two alarms and, for an address, a budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import dashboard
from infra.definitions.metrics import Metric
from infra.references import Alerts, ServiceRef
from infra.tags import metrics_namespace, tags

PERIOD_SECONDS = 300
# A head needs some minutes for its instance and its image.
HEAD_SILENT_MINUTES = 15
GPUS_IDLE_MINUTES = 30
IDLE_PERCENT = 5


@dataclass(frozen=True, kw_only=True)
class MonitoringArgs:
    """Inputs of Monitoring: the services of "head", "workers" and, if there are any, "cpu-workers".

    Without an address there is no mail, and no budget.
    """

    region: str
    services: Mapping[str, ServiceRef]
    alerts: Alerts

    @property
    def head(self) -> ServiceRef:
        """The head's service."""
        return self.services["head"]


class Monitoring(pulumi.ComponentResource):
    """The stack's dashboard, and alarms for a head that publishes nothing and for GPUs that idle."""

    dashboard_name: pulumi.Output[str]

    def __init__(self, name: str, args: MonitoringArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Monitoring", name, None, opts)
        actions = self._alarm_actions(name, args.alerts)
        self._alarm_head_silent(name, args, actions)
        self._alarm_gpus_idle(name, args, actions)
        if args.alerts.email:
            self._budget(name, args.alerts)
        self.dashboard_name = self._dashboard(name, args).dashboard_name
        self.register_outputs({"dashboard_name": self.dashboard_name})

    def _alarm_actions(self, name: str, alerts: Alerts) -> list[pulumi.Input[str]]:
        """The topic that alarms go to, if there is an address."""
        if not alerts.email:
            return []
        topic = aws.sns.Topic(f"{name}-alerts", tags=tags(f"{name}-alerts"), opts=pulumi.ResourceOptions(parent=self))
        aws.sns.TopicSubscription(
            f"{name}-email",
            topic=topic.arn,
            protocol="email",
            endpoint=alerts.email,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return [topic.arn]

    def _budget(self, name: str, alerts: Alerts) -> None:
        """Of the whole account: AWS tells costs by a tag only once it is activated for billing."""
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
        """While a head that runs publishes nothing, idle workers are not stopped: it may have a run."""
        self._alarm(
            f"{name}-head",
            f"The Ray head has published nothing for {HEAD_SILENT_MINUTES} minutes: it does not run, or can't publish",
            metric=Metric(namespace=metrics_namespace(args.head.cluster), name="GPUs", stat="Maximum"),
            below=0,
            minutes=HEAD_SILENT_MINUTES,
            missing="breaching",
            actions=actions,
        )

    def _alarm_gpus_idle(self, name: str, args: MonitoringArgs, actions: list[pulumi.Input[str]]) -> None:
        """While there are no GPUs, the head publishes no use of them."""
        self._alarm(
            f"{name}-gpus",
            f"No GPU of the Ray cluster has been used for {GPUS_IDLE_MINUTES} minutes",
            metric=Metric(namespace=metrics_namespace(args.head.cluster), name="GPUUtilization", stat="Maximum"),
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
        metric: Metric,
        below: int,
        minutes: int,
        missing: str,
        actions: list[pulumi.Input[str]],
    ) -> None:
        aws.cloudwatch.MetricAlarm(
            f"{name}-alarm",
            alarm_description=description,
            namespace=metric.namespace,
            metric_name=metric.name,
            statistic=metric.stat,
            dimensions=metric.dimensions,
            period=PERIOD_SECONDS,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            comparison_operator="LessThanThreshold",
            threshold=below,
            treat_missing_data=missing,
            alarm_actions=actions,
            tags=tags(f"{name}-alarm"),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _dashboard(self, name: str, args: MonitoringArgs) -> aws.cloudwatch.Dashboard:
        names = pulumi.Output.all(
            namespace=metrics_namespace(args.head.cluster),
            cluster=args.head.cluster,
            services=pulumi.Output.all(**{kind: each.name for kind, each in args.services.items()}),
        )
        body = names.apply(lambda known: json.dumps(dashboard.body(region=args.region, **known)))
        return aws.cloudwatch.Dashboard(
            f"{name}-dashboard",
            # Given, as CloudWatch makes up none; the cluster's name is unique.
            dashboard_name=args.head.cluster,
            dashboard_body=body,
            opts=pulumi.ResourceOptions(parent=self),
        )
