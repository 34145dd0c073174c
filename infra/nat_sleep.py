"""Start and stop of the NAT instance with the head: alarms on the requests for the head, and on its group."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import nat
from infra.scaling import PERIOD_SECONDS, group_policy, queries
from infra.tags import metrics_namespace
from infra.types import ResourceRef


@dataclass(frozen=True, kw_only=True)
class NatSleepArgs:
    """Inputs of NatSleep: the ECS cluster's name, and the Auto Scaling groups of the head and of the NAT instance.

    The head's group depends on the NAT instance's, so the alarms are apart from it.
    """

    cluster: pulumi.Output[str]
    head_group: ResourceRef
    nat_group: ResourceRef


class NatSleep(pulumi.ComponentResource):
    """Step policies of the NAT instance's group, and their alarms; the wake alarm applies `start_arn`, too."""

    start_arn: pulumi.Output[str]

    def __init__(self, name: str, args: NatSleepArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NatSleep", name, None, opts)
        self._name, self._args = name, args
        start, stop = (
            group_policy(f"{name}-{kind}", args.nat_group, capacity, **bound, opts=pulumi.ResourceOptions(parent=self))
            for kind, capacity, bound in (("start", 1, {"above": "0"}), ("stop", 0, {"below": "0"}))
        )
        self.start_arn = start.arn
        self._alarm("start", "NAT instance needed by the head", "GreaterThanOrEqualToThreshold", 1, start)
        unneeded = f"NAT instance not needed for {nat.UNNEEDED_MINUTES} minutes"
        self._alarm("stop", unneeded, "LessThanThreshold", nat.UNNEEDED_MINUTES, stop)
        self.register_outputs({"start_arn": self.start_arn})

    def _alarm(
        self, kind: str, description: str, comparison: str, minutes: int, policy: aws.autoscaling.Policy
    ) -> None:
        metrics = nat.metrics(metrics_namespace(self._args.cluster), self._args.head_group.name)
        aws.cloudwatch.MetricAlarm(
            f"{self._name}-{kind}-alarm",
            name=pulumi.Output.concat(self._args.cluster, "-nat-", kind),
            alarm_description=description,
            comparison_operator=comparison,
            threshold=1,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            metric_queries=queries(nat.NEEDED, "Needed", metrics),
            # Without data nothing is known, and nothing changes.
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            opts=pulumi.ResourceOptions(parent=self),
        )
