"""Scaling of the GPU or the CPU workers: out to the number that jobs request, in when they are idle.

Two alarms watch the metrics of head, runs and instances, and each sets the service's desired count through Application
Auto Scaling; the capacity provider starts and stops instances to match. Neither needs a laptop, and the scale-in needs
no head either. While an alarm is active its policy is applied each minute, and of several the largest number holds.
https://docs.aws.amazon.com/autoscaling/application/userguide/step-scaling-policy-overview.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions.metrics import AUTO_SCALING, Metric, of_service
from infra.references import NodeSpec, Scale, ServiceRef
from infra.tags import metrics_namespace, tags

# A change is over when its tasks are, not after ECS's usual five minutes.
COOLDOWN_SECONDS = 60
PERIOD_SECONDS = 60
# https://docs.aws.amazon.com/autoscaling/application/userguide/application-auto-scaling-limits.html
MAX_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class NodeScalingArgs:
    """Inputs of NodeScaling: the services of nodes and head, the nodes' Auto Scaling group and their kind."""

    service: ServiceRef
    head: ServiceRef
    group_name: pulumi.Input[str]
    scale: Scale
    kind: str
    node: NodeSpec

    @property
    def resource(self) -> str:
        """What jobs ask Ray for, and what the head's metrics are called by."""
        return "GPUs" if self.node.task.gpus else "CPUs"

    @property
    def units(self) -> int:
        """How many of these each node has."""
        return self.node.task.gpus or self.node.task.vcpus


class NodeScaling(pulumi.ComponentResource):
    """The policies and alarms that move the number of one kind of task."""

    def __init__(self, name: str, args: NodeScalingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NodeScaling", name, None, opts)
        self._args = args
        self._most = args.scale.max_count * args.units
        self._target = self._scalable_target(name)
        self._metrics = _metrics(args)
        self._scale_out_alarm(name)
        if args.scale.idle_minutes and args.scale.min_count < args.scale.max_count:
            self._idle_alarm(name)
        self.register_outputs({})

    def _scalable_target(self, name: str) -> aws.appautoscaling.Target:
        # Without tags: it is a setting of the service, which has them, and costs nothing.
        return aws.appautoscaling.Target(
            f"{name}-target",
            service_namespace="ecs",
            scalable_dimension="ecs:service:DesiredCount",
            resource_id=pulumi.Output.concat("service/", self._args.service.cluster, "/", self._args.service.name),
            min_capacity=self._args.scale.min_count,
            max_capacity=self._args.scale.max_count,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _scale_out_alarm(self, name: str) -> None:
        """Set the number to what jobs want while that is more than what is there, and to no less than what runs.

        What runs is counted in tasks: from zero ECS starts two instances at once, for a job that wants one, too. A
        service without tasks has no such metric, hence the 0; where it is late, the last number holds. The others are
        not filled: a minute that comes late is no minute in which nobody wants anything.
        """
        scale, units = self._args.scale, self._args.units
        steps = scaling_steps(units=units, min_count=scale.min_count, max_count=scale.max_count)
        short = f"requested > available && available < {self._most}"
        self._alarm(
            name,
            "short",
            f"Jobs of the Ray cluster wait for {self._args.resource}",
            expression=f"IF({short}, MAX([requested, FILL(FILL(tasks, REPEAT), 0) * {units}]), 0)",
            above=0,
            minutes=1,
            policy=self._policy(f"{name}-short", steps),
        )

    def _idle_alarm(self, name: str) -> None:
        """Scale in to `min_count` once the nodes have been idle for `idle_minutes`.

        They are in use while Ray has work on them, whichever program it belongs to; while a program requests nodes,
        unless it requests more than there can be and all of them are there; and while a run reports progress. A head
        that runs and publishes nothing may have a run: its silence is not a reason to end one. A head that does not run
        has none.

        Instances are counted, since they are billed, also where no task comes to run on them. So are those that EC2 is
        asked for and does not have: they would start later. A metric that is missing counts as 0, even if it never had
        a value: MAX skips it, and `instances` always has one, where FILL of an empty metric may give nothing.
        """
        scale, most = self._args.scale, self._most
        used, requested, progress, head = (
            f"MAX([{metric}, instances * 0])" for metric in ("used", "requested", "progress", "head")
        )
        # One more than there are, so that it is 0 where the metric is missing alone.
        published = "MAX([available + 1, instances * 0])"
        in_use = [
            f"{used} > 0",
            f"({requested} > 0 && ({requested} <= {most} || {published} <= {most}))",
            f"({head} > 0 && {published} == 0)",
        ]
        if self._args.node.task.gpus:  # CPU workers may well be idle while GPUs train
            in_use.append(f"{progress} > 0")
        step = aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs(
            metric_interval_lower_bound="0", scaling_adjustment=scale.min_count
        )
        self._alarm(
            name,
            "idle",
            f"Ray {self._args.kind} idle for {scale.idle_minutes} minutes (scale in to {scale.min_count})",
            expression=f"IF({' || '.join(in_use)}, 0, MAX([instances, wanted]))",
            above=scale.min_count,
            minutes=scale.idle_minutes,
            policy=self._policy(f"{name}-idle", [step]),
        )

    def _policy(
        self, name: str, steps: list[aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs]
    ) -> aws.appautoscaling.Policy:
        return aws.appautoscaling.Policy(
            f"{name}-policy",
            policy_type="StepScaling",
            service_namespace=self._target.service_namespace,
            scalable_dimension=self._target.scalable_dimension,
            resource_id=self._target.resource_id,
            step_scaling_policy_configuration=aws.appautoscaling.PolicyStepScalingPolicyConfigurationArgs(
                # An exact number can be set again and again while instances are still starting.
                adjustment_type="ExactCapacity",
                cooldown=COOLDOWN_SECONDS,
                metric_aggregation_type="Maximum",
                step_adjustments=steps,
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._target]),
        )

    def _alarm(
        self,
        name: str,
        kind: str,
        description: str,
        *,
        expression: str,
        above: int,
        minutes: int,
        policy: aws.appautoscaling.Policy,
    ) -> None:
        used = {key: metric for key, metric in self._metrics.items() if re.search(rf"\b{key}\b", expression)}
        result = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="result", expression=expression, label=description, return_data=True
        )
        aws.cloudwatch.MetricAlarm(
            f"{name}-{kind}-alarm",
            # By this name `ray-on-ecs status` finds it.
            name=pulumi.Output.concat(self._args.service.cluster, "-", self._args.kind, "-", kind),
            alarm_description=description,
            comparison_operator="GreaterThanThreshold",
            threshold=above,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            metric_queries=[result, *(_query(key, metric) for key, metric in used.items())],
            # No number at all: there is no service to move, or no head that asks.
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            tags=tags(f"{name}-{kind}-alarm"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def _metrics(args: NodeScalingArgs) -> dict[str, Metric]:
    """What the alarms' expressions speak of."""
    own = {
        "requested": f"{args.resource}Requested",
        "used": f"{args.resource}Used",
        "available": args.resource,
        "progress": "RunProgress",
    }
    namespace, group = metrics_namespace(args.service.cluster), {"AutoScalingGroupName": args.group_name}
    return {
        **{key: Metric(namespace=namespace, name=name, stat="Maximum") for key, name in own.items()},
        "tasks": of_service("RunningTaskCount", args.service.cluster, args.service.name, "Maximum"),
        "head": of_service("RunningTaskCount", args.head.cluster, args.head.name, "Maximum"),
        "instances": Metric(namespace=AUTO_SCALING, name="GroupInServiceInstances", stat="Maximum", dimensions=group),
        "wanted": Metric(namespace=AUTO_SCALING, name="GroupDesiredCapacity", stat="Maximum", dimensions=group),
    }


def _query(query_id: str, metric: Metric) -> aws.cloudwatch.MetricAlarmMetricQueryArgs:
    """The metric as a variable of an alarm's expression."""
    return aws.cloudwatch.MetricAlarmMetricQueryArgs(
        id=query_id,
        metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
            namespace=metric.namespace,
            metric_name=metric.name,
            stat=metric.stat,
            period=PERIOD_SECONDS,
            dimensions=metric.dimensions,
        ),
    )


def scaling_steps(
    *, units: int, min_count: int, max_count: int
) -> list[aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs]:
    """The number of nodes for each number of GPUs or CPUs that is requested, of which each node has `units`.

    A policy has at most 20 steps; for more workers than that, a step stands for several and takes the largest of them.
    """
    stride = -(-max_count // MAX_STEPS)
    numbers = [min(number, max_count) for number in range(stride, max_count + stride, stride)]
    # Half a unit beside the whole numbers, as a step begins at its lower bound and ends before its upper one.
    edges = ["0", *(str(number * units + 0.5) for number in numbers[:-1]), None]
    return [
        aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs(
            metric_interval_lower_bound=lower,
            metric_interval_upper_bound=upper,
            scaling_adjustment=max(number, min_count),
        )
        for number, lower, upper in zip(numbers, edges[:-1], edges[1:], strict=True)
    ]
